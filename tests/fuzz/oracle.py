"""The oracle: the same program in plain PyTorch, in one process, one batch per step.

It takes the order of samples from `resilin.core.stream`, and nothing else from resilin: the batch
sizes, the factors of the rules and the clock are written out here once more.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from resilin.core.stream import SampleStream
from tests.fuzz import parts
from tests.fuzz.program import Program

ROUNDING = 1e-6


class Oracle:
    """One undisturbed run of a program."""

    def __init__(self, program: Program, diary: list[dict[str, Any]] | None = None) -> None:
        self.p = program
        self.diary = diary
        """Sizes and factors of the steps, where a rule follows noise that only the run knows."""
        self.stream = SampleStream(program.num_samples, shuffle=program.shuffle)
        self.cursor = 0
        self.steps = 0
        self.samples = 0
        self.sample_steps = 0.0
        self.epoch = 0
        self.left = False
        self.data = parts.train_data(program)
        self.test = parts.test_data(program)
        self.net = parts.make_net(program)
        self.optimizers = parts.make_optimizers(program, self.net)
        self.schedulers = [
            parts.make_scheduler(program, optimizer)
            for optimizer in self.optimizers
            if program.scheduler != "none"
        ]
        self.scaler = parts.make_scaler() if program.scaler else None
        self.ema = parts.Ema(self.net) if program.ema else None
        self.history = parts.History()

    def run(self) -> dict[str, Any]:
        p = self.p
        for self.epoch in range(p.epochs):
            parts.freeze(p, self.net, self.epoch)
            self.epoch_samples = 0
            self._epoch()
            if p.train_stats:
                self.history.append(self.epoch_samples)
            if p.evaluate != "none" and p.evaluate_every is None:
                self._evaluate()
            if p.schedule == "epoch":
                told = self.history.values[-1:] if p.scheduler == "ReduceLROnPlateau" else ()
                for scheduler in self.schedulers:
                    scheduler.step(*told)
        return parts.final_state(
            self.net,
            self.optimizers,
            self.schedulers,
            self.scaler,
            self.ema,
            self.history,
            self.steps,
            self.samples,
        )

    # Data ----------------------------------------------------------------------------------

    def _batch_size(self) -> int:
        p = self.p
        if self.diary is not None:
            return int(self.diary[self.steps]["samples"]) - self.samples
        if p.sizes == "fixed":
            return p.batch_size
        index = {
            "trace": self.steps // 2,
            "clock": self.steps // 2,
            "schedule": int((self.sample_steps + ROUNDING) // 2),
            "epoch": self.epoch,
            "once": 0,
        }[p.sizes]
        if p.sizes == "once" and self.epoch == 0:
            return p.batch_size
        return p.trace[min(index, len(p.trace) - 1)]

    def _span(self) -> range:
        """The positions of the next step."""
        size, n = self._batch_size(), self.p.num_samples
        left = n - self.cursor % n
        if size <= left or self.p.tail == "straddle":
            return range(self.cursor, self.cursor + size)
        if self.p.tail == "short":
            return range(self.cursor, self.cursor + left)
        return range(self.cursor + left, self.cursor + left + size)

    def _reference_steps(self, cursor: int) -> float:
        n, b = self.p.num_samples, self.p.batch_size
        epoch, offset = divmod(cursor, n)
        if self.p.tail == "drop":
            return epoch * (n // b) + min(offset / b, n // b)
        per_epoch = n / b if self.p.tail == "straddle" else -(-n // b)
        return epoch * per_epoch + offset * per_epoch / n

    # One epoch -----------------------------------------------------------------------------

    def _epoch(self) -> None:
        p, n = self.p, self.p.num_samples
        if p.recreate and self.left:
            # The loader that was left is gone, and its pass with it.
            self.cursor = -(-self.cursor // n) * n
        self.left = False
        end = 0 if self.diary is not None else (self._span().start // n + 1) * n
        while self._in_epoch(end):
            span = self._span()
            self.epoch_samples += len(span)
            committed = self._step(span)
            self.cursor = span.stop
            if p.schedule == "step":
                for scheduler in self.schedulers:
                    scheduler.step()
            if not committed:
                continue
            if self.ema is not None:
                self.ema.update(self.net)
            if p.evaluate != "none" and p.evaluate_every and self.steps % p.evaluate_every == 0:
                self._evaluate()
            if p.break_after is not None and self.steps >= (self.epoch + 1) * p.break_after:
                self.left = True
                return
        self.cursor = max(self.cursor, end)

    def _in_epoch(self, end: int) -> bool:
        if self.diary is not None:
            return self.steps < len(self.diary) and self.diary[self.steps]["epoch"] == self.epoch
        return self.cursor < end and self._span().start < end

    def _step(self, span: range) -> bool:
        """One batch. Returns whether an optimizer stepped; a GradScaler may have skipped them."""
        p = self.p
        indices = torch.as_tensor(self.stream.indices(span))
        if p.bad != "none":
            indices = indices[indices != parts.BAD]
        x, y, idx, weight = (tensor[indices] for tensor in self.data.tensors)
        self.net.zero_grad()
        out, seen = self.net(x, idx)
        loss = parts.sample_loss(p, out, y, seen, weight)
        if self.scaler is not None:
            loss = self.scaler.scale(parts.overflow(loss, idx, self.scaler))
        loss.backward()
        size = self._batch_size()
        scale = size / p.batch_size
        if len(span) < size:
            scale = min(scale, float(math.ceil(len(span) / p.batch_size)))
        if p.clip != "none":
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            invariant = parts.MAX_NORM / math.sqrt(min(1.0, scale))
            norm = {
                "fixed": parts.MAX_NORM,
                "invariant": invariant,
                "loosen": max(parts.MAX_NORM, invariant),
            }[p.clip]
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), norm)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        own = [dict(group) for group in groups]
        for number, optimizer in enumerate(self.optimizers):
            before = sum(len(other.param_groups) for other in self.optimizers[:number])
            self._apply_rule(scale, optimizer, (p.optimizer, *p.others)[number], before)
        made_by = list(map(self._stepped, self.optimizers))
        if self.scaler is not None:
            self.scaler.update()
        committed = any(made_by)
        for group, before_step in zip(groups, own, strict=True):
            group.update({k: before_step[k] for k in before_step if k != "params"})
        if not committed:
            return False
        made = self._reference_steps(span.stop) - self._reference_steps(self.cursor)
        before_time, self.sample_steps = self.sample_steps, self.sample_steps + made
        self.steps += 1
        self.samples += len(indices)
        if p.schedule == "clock":
            # It ends with the run, also where the last batch reaches into the next epoch.
            n, b = p.num_samples, p.batch_size
            per_epoch = {"straddle": n / b, "drop": n // b, "short": -(-n // b)}[p.tail]
            before_time, now = (
                math.floor(min(time, p.epochs * per_epoch) + ROUNDING)
                for time in (before_time, self.sample_steps)
            )
            for scheduler in self.schedulers:
                for _ in range(now - before_time):
                    scheduler.step()
        return True

    def _stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer has stepped: torch leaves it alone where its part overflows."""
        if self.scaler is None:
            optimizer.step()
            return True
        called = []
        handle = optimizer.register_step_pre_hook(lambda *_: called.append(True))
        self.scaler.step(optimizer)
        handle.remove()
        return bool(called)

    def _apply_rule(
        self, scale: float, optimizer: torch.optim.Optimizer, kind: str, before: int
    ) -> None:
        """Applies the rule to an optimizer, whose groups come after `before` others."""
        rule = self.p.rule
        if self.diary is not None:
            told = self.diary[self.steps]
            for number, group in enumerate(optimizer.param_groups, before):
                group["lr"] *= told["lr"][number]
                if kind != "adam":
                    group["weight_decay"] *= told["weight_decay"][number]
                if "betas" in group:
                    power = told["beta_power"][number]
                    group["betas"] = tuple(beta**power for beta in group["betas"])
                if group.get("momentum"):
                    self._scale_momentum(group, told["momentum_power"][number])
            return
        for group in optimizer.param_groups:
            factor = {"constant": 1.0, "linear": scale, "sqrt": scale**0.5, "malladi": scale**0.5}
            if rule == "legw":
                warm = min(1.0, (self.sample_steps + scale) / (parts.WARMUP * scale))
                lr = warm * scale**0.5
            else:
                lr = factor[rule]
            group["lr"] *= lr
            if rule == "sqrt" and kind != "adam":
                # L2 in Adam is divided by the gradient's own size, so it has no factor.
                group["weight_decay"] *= scale / lr
            if rule == "malladi" and "betas" in group:
                group["betas"] = tuple(beta**scale for beta in group["betas"])
                group["eps"] *= scale**-0.5

    @staticmethod
    def _scale_momentum(group: dict[str, Any], power: float) -> None:
        # As many reference steps with one gradient: mu^r, and 1 + mu + ... on the gradient.
        share = (1 - group["momentum"] ** power) / (1 - group["momentum"])
        group["momentum"] **= power
        group["weight_decay"] *= share
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(share)

    def _evaluate(self) -> None:
        with torch.no_grad():
            x, y, idx, _ = self.test.tensors
            out, _ = self.net(x, idx)
            self.history.append(float(((out - y) ** 2).sum()))
