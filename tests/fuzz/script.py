"""Writes a program down as a script of a user of resilin."""

from __future__ import annotations

from tests.fuzz.program import Program, changed


def write(p: Program) -> str:
    """The source of the script. Features that the program lacks leave no trace in it."""
    lines: list[str] = []
    add = lines.append
    add('"""A random program; see tests/fuzz."""')
    add("")
    add("import torch")
    add("")
    add("import resilin")
    add("from resilin.core.rules import LEGW, PowerRule")
    add("from tests.fuzz import parts")
    add("from tests.fuzz.hooks import folder, kill_point, report")
    add("from tests.fuzz.program import Program")
    add("")
    add(f"p = Program(**{changed(p)!r})")
    add("torch.set_num_threads(1)")
    add("resilin.init_process_group()")
    add('kill_point("setup")')
    add("dataset = parts.train_data(p)")
    add("net = parts.make_net(p)")
    if p.shard != "none":
        add("parts.shard(p, net)")
    if p.others:
        add("optimizer = optimizers = parts.make_optimizers(p, net)")
        made = "[parts.make_scheduler(p, each) for each in optimizers]"
    else:
        add("optimizer = parts.make_optimizer(p, net)")
        made = "parts.make_scheduler(p, optimizer)"
    add(f"scheduler = {made if p.scheduler != 'none' else None}")
    add(f"scaler = {'parts.make_scaler()' if p.scaler else None}")
    lines += _wrap(p)
    if not p.recreate:
        lines += _loader(p, "")
    if p.evaluate != "none":
        lines += _evaluation(p)
    add("history = parts.History()")
    add('resilin.register("history", history)')
    if p.adaptive:
        add("diary = parts.Diary()")
        add('resilin.register("diary", diary)')
    add(f"ema = {'parts.Ema(net)' if p.ema else None}")
    if p.ema:
        add('resilin.register("ema", ema)')
    place = 'folder() / "checkpoints"' if p.checkpoints else "None"
    every, memory = p.checkpoint_every, p.memory_every
    add(f"resilin.checkpoint_to({place}, every={every!r}, memory_every={memory!r})")
    add('kill_point("wrapped")')
    add("")
    lines += _loop(p)
    add('kill_point("trained")')
    more = ", diary" if p.adaptive else ""
    add(f"report(net, optimizer, scheduler, scaler, ema, history, model.clock{more})")
    add('kill_point("reported")')
    return "\n".join(lines) + "\n"


def _wrap(p: Program) -> list[str]:
    rule = {
        "malladi": "PowerRule(0.5, betas=True, eps=True)",
        "legw": "LEGW(parts.WARMUP)",
    }.get(p.rule, repr(p.rule))
    arguments = [f"rule={rule}"]
    if p.schedule == "clock":
        arguments.append('schedule_by="samples"')
    if p.scaler:
        arguments.append("scaler=scaler")
    if p.stats_every != "auto":
        arguments.append(f"stats_every={p.stats_every}")
    if p.net in ("unused", "sometimes") and p.shard == "none":
        arguments.append("find_unused_parameters=True")
    if p.bucket_kb is not None:
        arguments.append(f"bucket_cap_mb={p.bucket_kb / 1024!r}")
    module = 'torch.compile(net, backend="aot_eager")' if p.net == "compiled" else "net"
    return [
        "model = resilin.AdaptiveDataParallel(",
        f"    {module}, optimizer, scheduler, {', '.join(arguments)}",
        ")",
    ]


def _loader(p: Program, indent: str) -> list[str]:
    arguments = [f"batch_size={p.batch_size}", f"shuffle={p.shuffle}"]
    if p.tail == "drop":
        arguments.append("drop_last=True")
    elif p.tail != "short":
        arguments.append(f"tail={p.tail!r}")
    if p.max_local_bsz is not None:
        arguments.append(f"max_local_bsz={p.max_local_bsz}")
    if p.weights == "batch_weight":
        arguments.append("batch_weight=lambda batch: parts.unpack(batch)[3].sum()")
    if p.collate != "default":
        arguments.append(f"collate_fn=parts.COLLATES[{p.collate!r}]")
    if p.num_workers:
        arguments.append(f"num_workers={p.num_workers}")
    lines = [f"loader = resilin.AdaptiveDataLoader(dataset, {', '.join(arguments)})"]
    sizes = repr(tuple(p.trace))
    if p.sizes == "trace":
        starts = tuple(2 * i for i in range(len(p.trace)))
        lines.append(f"loader.set_batch_size(resilin.BatchTrace({starts!r}, {sizes}))")
    elif p.sizes == "clock":
        last = len(p.trace) - 1
        lines.append(f"loader.set_batch_size(lambda clock: {sizes}[min(clock.steps // 2, {last})])")
    elif p.sizes == "schedule":
        last = len(p.trace) - 1
        lines.append(
            f"loader.set_batch_size(resilin.Schedule("
            f"lambda t: {sizes}[min(int((t + 1e-6) // 2), {last})]))"
        )
    elif p.sizes == "auto":
        lines.append(f"loader.autoscale_batch_size({4 * p.batch_size})")
    return [indent + line for line in lines]


def _evaluation(p: Program) -> list[str]:
    if p.evaluate == "plain":
        loader = "torch.utils.data.DataLoader(parts.test_data(p), batch_size=3)"
    else:
        # The model is called by all replicas or by none if it is sharded.
        size = 3 if p.shard == "none" else "parts.NUM_TEST"
        loader = f"resilin.AdaptiveDataLoader(parts.test_data(p), batch_size={size})"
    lines = [
        f"test_loader = {loader}",
        "",
        "",
        "def evaluate():",
        "    stats = resilin.Accumulator()",
    ]
    if p.evaluate != "no_grad":
        lines.append("    model.eval()")
    lines += [
        "    with torch.no_grad():",
        "        for x, y, idx, _ in test_loader:",
        '            kill_point("evaluating")',
        "            out, _ = model(x, idx)",
        '            stats["loss"] += ((out - y) ** 2).sum()',
    ]
    if p.evaluate != "no_grad":
        lines.append("    model.train()")
    lines += ["    with stats.synchronized():"]
    share = (
        " / resilin.current_job().engine.membership.num_replicas" if p.evaluate == "plain" else ""
    )
    lines += [
        f'        history.append(stats["loss"]{share})',
        '    kill_point("evaluated")',
        "",
        "",
    ]
    return lines


def _loop(p: Program) -> list[str]:
    lines: list[str] = []
    add = lines.append
    add(f"for epoch in resilin.remaining_epochs_until({p.epochs}):")
    if p.recreate:
        lines += _loader(p, "    ")
    if p.sizes == "epoch":
        add(f"    loader.set_batch_size({p.trace!r}[min(epoch, {len(p.trace) - 1})])")
    elif p.sizes == "once":
        add("    if epoch == 1:")
        add(f"        loader.set_batch_size({p.trace[0]})")
    if p.frozen == "once":
        add("    if epoch == 1:")
        add("        net.first.requires_grad_(True)")
    elif p.frozen != "none":
        add("    parts.freeze(p, net, epoch)")
    if p.train_stats:
        add("    stats = resilin.Accumulator()")
    add('    kill_point("epoch")')
    if p.reader == "none":
        add("    for batch in loader:")
    else:
        add(f"    for batch in parts.READERS[{p.reader!r}](loader):")
    add('        kill_point("batch")')
    add("        x, y, idx, weight = parts.unpack(batch)")
    add("        before = model.clock.steps")
    if p.zero_first:
        lines += _zero(p)
    body = []
    if p.weights == "model_weight":
        body.append("with model.weight(float(weight.sum())):")
        body.append("    out, seen = model(x, idx)")
    else:
        body.append("out, seen = model(x, idx)")
    body.append('kill_point("forward")')
    body.append("loss = parts.sample_loss(p, out, y, seen, weight)")
    if p.scaler:
        body.append("scaler.scale(parts.overflow(loss, idx, scaler)).backward()")
    elif p.bad == "skip":
        body.append("if (idx == parts.BAD).any():")
        body.append("    loss = loss * torch.nan")
        body.append("if loss.isfinite():")
        body.append("    loss.backward()")
    else:
        body.append("loss.backward()")
    if p.closure:
        lines.extend(("", "        def closure():"))
        lines.extend("            " + line for line in body)
        lines.extend(("            return loss", ""))
    elif p.bad == "raise":
        add("        try:")
        lines.extend("            " + line for line in body)
        add("        except parts.BadSample:")
        add("            pass")
    else:
        lines.extend("        " + line for line in body)
    add('        kill_point("backward")')
    if p.train_stats:
        add('        stats["samples"] += loader.current_samples')
    if p.clip != "none":
        if p.scaler:
            lines += _each(p, "scaler.unscale_(optimizer)")
        add(f"        model.clip_grad_norm_(parts.MAX_NORM, policy={p.clip!r})")
    if p.closure:
        add("        optimizer.step(closure)")
    else:
        lines += _steps(p)
    add('        kill_point("stepped")')
    if not p.zero_first:
        if p.order != "interleaved":
            lines += _zero(p)
        add('        kill_point("zeroed")')
    if p.scheduler != "none" and p.schedule == "step":
        lines += _each(p, "scheduler.step()")
    inner = p.evaluate != "none" and p.evaluate_every is not None
    if p.ema or inner or p.break_after is not None or p.adaptive:
        add("        if model.clock.steps > before:")
        if p.adaptive:
            add("            diary.append(epoch, model)")
        if p.ema:
            add("            ema.update(net)")
        if inner:
            add(f"            if model.clock.steps % {p.evaluate_every} == 0:")
            add("                evaluate()")
        if p.break_after is not None:
            add(f"            if model.clock.steps >= (epoch + 1) * {p.break_after}:")
            add("                break")
    add('    kill_point("epoch_end")')
    if p.train_stats:
        add("    with stats.synchronized():")
        add('        history.append(stats["samples"])')
    if p.evaluate != "none" and not inner:
        add("    evaluate()")
    if p.scheduler == "ReduceLROnPlateau":
        lines += _each(p, "scheduler.step(history.values[-1])", "    ")
    elif p.scheduler != "none" and p.schedule == "epoch":
        lines += _each(p, "scheduler.step()", "    ")
    return lines


def _each(p: Program, call: str, indent: str = " " * 8) -> list[str]:
    """A call of the optimizer or its scheduler, or of each of them."""
    if not p.others:
        return [indent + call]
    name = "scheduler" if "scheduler" in call else "optimizer"
    loop = f"for each in {'optimizers' if name == 'optimizer' else 'scheduler'}:"
    return [indent + loop, indent + "    " + call.replace(name, "each")]


def _zero(p: Program) -> list[str]:
    return ["        model.zero_grad()"] if p.zero == "model" else _each(p, "optimizer.zero_grad()")


def _steps(p: Program) -> list[str]:
    call = "scaler.step(each)" if p.scaler else "each.step()"
    if p.others:
        every = "reversed(optimizers)" if p.order == "reversed" else "optimizers"
        lines = [f"        for each in {every}:", f"            {call}"]
        if p.order == "interleaved" and not p.zero_first:
            lines.append("            each.zero_grad()")
        lines.append('            kill_point("between")')
    else:
        lines = ["        " + call.replace("each", "optimizer"), '        kill_point("between")']
    return lines + (["        scaler.update()"] if p.scaler else [])
