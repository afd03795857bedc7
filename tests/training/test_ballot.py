"""The ballot of a step, without a step."""

import pytest
import torch.distributed as dist

from resilin.training.ballot import Ballot, Head
from tests.replicas import replica

HEAD = Head(
    weight=2.0,
    samples=2.0,
    gradients=1.0,
    seconds=0.0,
    step_seconds=1.0,
    steps=5.0,
    divisor=4.0,
    skips=0.0,
    changes=0.0,
    signature=7.0,
)


class Clerk:
    def __init__(self, *says):
        self.says, self.told = says, []

    def votes(self):
        return self.says

    def counted(self, votes):
        self.told.append(votes)


def test_alone_each_voter_is_told_its_own_numbers():
    clerks = [Clerk(1.0), Clerk(), Clerk(2.0, 3.0)]
    ballot = Ballot(clerks)
    ballot.send(HEAD, None)
    assert ballot.sent is None
    assert ballot.sums()._replace(voters=0.0) == HEAD
    ballot.count()
    assert [clerk.told for clerk in clerks] == [[(1.0,)], [()], [(2.0, 3.0)]]


@pytest.mark.world_size(2)
def test_each_voter_is_told_the_sums_of_its_own_numbers():
    clerks = [Clerk(1.0), Clerk(), Clerk(2.0, 3.0 + replica())]
    ballot = Ballot(clerks)
    ballot.send(HEAD._replace(samples=2.0 + replica()), dist.group.WORLD)
    sums = ballot.sums()
    assert (sums.weight, sums.samples, sums.signature) == (4.0, 5.0, 14.0)
    ballot.count()
    assert [clerk.told for clerk in clerks] == [[(2.0,)], [()], [(4.0, 7.0)]]


def test_who_leaves_or_joins_in_a_step_does_not_change_what_the_others_are_told():
    leaves, stays, joins = Clerk(1.0, 2.0), Clerk(3.0), Clerk(4.0)
    voters = [leaves, stays]
    ballot = Ballot(voters)
    ballot.send(HEAD, None)
    voters.remove(leaves)
    voters.append(joins)
    ballot.count()
    assert (leaves.told, stays.told, joins.told) == ([], [(3.0,)], [])


def test_a_step_without_a_ballot_tells_nobody():
    clerk = Clerk(1.0)
    ballot = Ballot([clerk])
    ballot.send(HEAD, None)
    ballot.count()
    ballot.count()
    ballot.forget()
    ballot.count()
    assert clerk.told == [(1.0,)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("apart", "complaint"),
    [
        ({"steps": 6.0}, "not in the same step"),
        ({"signature": 8.0}, "requires_grad differs"),
        ({"changes": 1.0}, "requires_grad differs"),
        ({"divisor": 5.0}, "different total weights: .* A batch size that the script sets must be"),
    ],
)
def test_replicas_that_do_not_make_the_same_step_are_told(apart, complaint):
    ballot = Ballot([])
    ballot.send(HEAD._replace(**apart) if replica() else HEAD, dist.group.WORLD)
    with pytest.raises(RuntimeError, match=complaint):
        ballot.sums()


@pytest.mark.world_size(2)
def test_replicas_that_vote_on_different_things_are_told():
    class Other(Clerk):
        pass

    # One who has nothing to say is no difference.
    ballot = Ballot([Clerk(1.0), Other()] if replica() else [Clerk(1.0)])
    ballot.send(HEAD, dist.group.WORLD)
    assert ballot.sums().samples == 4.0
    for voters in ([Clerk(1.0), Other(2.0)], [Clerk(1.0, 2.0)], [Other(1.0)]):
        ballot = Ballot(voters if replica() else [Clerk(1.0)])
        ballot.send(HEAD, dist.group.WORLD)
        own = r"Clerk \(1\), and not" if replica() == 0 else "vote on different things"
        with pytest.raises(RuntimeError, match=own):
            ballot.sums()
