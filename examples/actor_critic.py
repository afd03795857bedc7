"""Actor and critic, trained on recorded transitions: two parameter groups of one optimizer.

    python examples/actor_critic.py
    resilin run --nproc 2 examples/actor_critic.py

The critic learns in each step, the actor in every second one: their losses are added up. A target
network follows the critic slowly. It is changed once per optimizer step, and registered, so that it
survives restarts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import resilin

GAMMA, TAU = 0.9, 0.01


def transitions(num=2000):
    """Random moves of a point on a line; the reward is high near 0."""
    generator = torch.Generator().manual_seed(0)
    state = 4 * torch.rand(num, 1, generator=generator, dtype=torch.float64) - 2
    action = 2 * torch.rand(num, 1, generator=generator, dtype=torch.float64) - 1
    after = state + action
    return TensorDataset(state, action, -after.square(), after)


def network(num_inputs):
    return nn.Sequential(nn.Linear(num_inputs, 32), nn.Tanh(), nn.Linear(32, 1)).double()


class ActorCritic(nn.Module):
    """Both networks, and their losses on a batch of transitions."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(network(1), nn.Tanh())
        self.critic = network(2)

    def forward(self, state, action, goal, *, actor_learns):
        value = self.critic(torch.cat([state, action], dim=1))
        loss = F.mse_loss(value, goal)
        if actor_learns:
            # The actor learns through a critic that does not learn from it.
            fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
            proposed = torch.cat([state, self.actor(state)], dim=1)
            loss = loss - functional_call(self.critic, fixed, (proposed,)).mean()
        return loss


def main():
    torch.manual_seed(0)
    both, target = ActorCritic(), ActorCritic()
    target.load_state_dict(both.state_dict())
    optimizer = torch.optim.Adam(
        [
            {"params": both.actor.parameters(), "lr": 0.002},
            {"params": both.critic.parameters(), "lr": 0.01},
        ]
    )
    resilin.init_process_group()
    resilin.checkpoint_to(None, memory_every=1)
    # In every second step, the actor has no gradient.
    model = resilin.AdaptiveDataParallel(both, optimizer, find_unused_parameters=True)
    resilin.register("target", target)
    loader = resilin.AdaptiveDataLoader(
        transitions(), batch_size=100, shuffle=True, max_local_bsz=30
    )

    for epoch in resilin.remaining_epochs_until(10):
        for state, action, reward, after in loader:
            with torch.no_grad():
                following = torch.cat([after, target.actor(after)], dim=1)
                goal = reward + GAMMA * target.critic(following)
            model(state, action, goal, actor_learns=model.clock.steps % 2 == 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.stepped:
                with torch.no_grad():
                    for slow, fast in zip(target.parameters(), both.parameters(), strict=True):
                        slow.lerp_(fast, TAU)
        if epoch == 9 and resilin.current_job().engine.membership.is_first:
            with torch.no_grad():
                left, right = both.actor(torch.tensor([[-1.0], [1.0]]).double()).flatten().tolist()
            print(f"{model.clock.steps} steps, moves {left:+.2f} from -1 and {right:+.2f} from +1")
    return nn.ModuleList([both, target])


if __name__ == "__main__":
    main()
