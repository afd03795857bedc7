"""The ballot of a step, without a step."""

from resilin.training.ballot import Ballot


class Clerk:
    def __init__(self, *says):
        self.says, self.told = says, []

    def votes(self):
        return self.says

    def counted(self, votes):
        self.told.append(votes)


def test_each_voter_is_told_the_sums_of_its_own_numbers():
    clerks = [Clerk(1.0), Clerk(), Clerk(2.0, 3.0)]
    ballot = Ballot(clerks)
    assert ballot.cast() == (1.0, 2.0, 3.0)
    ballot.count((10.0, 20.0, 30.0))
    assert [clerk.told for clerk in clerks] == [[(10.0,)], [()], [(20.0, 30.0)]]


def test_who_leaves_or_joins_in_a_step_does_not_change_what_the_others_are_told():
    leaves, stays, joins = Clerk(1.0, 2.0), Clerk(3.0), Clerk(4.0)
    voters = [leaves, stays]
    ballot = Ballot(voters)
    ballot.cast()
    voters.remove(leaves)
    voters.append(joins)
    ballot.count((10.0, 20.0, 30.0))
    assert (leaves.told, stays.told, joins.told) == ([], [(30.0,)], [])


def test_a_step_without_a_ballot_tells_nobody():
    clerk = Clerk(1.0)
    ballot = Ballot([clerk])
    ballot.cast()
    ballot.count((1.0,))
    ballot.count(())
    assert clerk.told == [(1.0,)]
