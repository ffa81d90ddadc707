"""Draw the pictures of the documentation from the code that they are about, into docs/images.

    python docs/pictures.py           # write them
    python docs/pictures.py --check   # fail if a file is not what the code draws

The layout is the planner's, the memory of a step is that of ``bmtrain plan``, timelines are simulated, an optimizer's
messages are those that one of its steps sends, and a checkpoint's pieces are those of its write plan. One process
stands for a rank of several (``bmt_comm.planned_context``), so this needs no other ranks.
"""

from __future__ import annotations

import argparse
import html
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bmt_optim
import bmtrain as bmt
from bmt_comm import Slice, planned_context
from bmt_comm.planned import PlannedCommunicator
from bmt_comm.work import DONE
from bmt_pipe import Kind, idle_share, make_schedule, simulate
from bmt_zero import plan_layouts, shard
from bmt_zero.checkpoints.headers import Entry, lay_out
from bmt_zero.checkpoints.plan import PIECE, AddressSpace, Holding, WritePlan, replicate_groups
from bmt_zero.checkpoints.regions import regions_of
from bmtrain.planning import DEVICES, Job, Settings, estimate, load_model

IMAGES = Path(__file__).resolve().parent / "images"
# From the palette of Okabe and Ito, which colour-blind people tell apart.
BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PURPLE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#F0E442",
    "#56B4E9",
    "#D55E00",
    "#CC79A7",
)
COLOURS = (BLUE, ORANGE, GREEN, SKY, PURPLE, YELLOW, RED)
GREY, INK, PALE = "#ADB5BD", "#212529", "#E9ECEF"
DARK = (BLUE, GREEN, RED)


class Drawing:
    """An SVG file: rectangles, lines and texts on white."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, text: str = "") -> None:
        """A box, with a text in its middle."""
        box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {box} fill="{fill}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", "white" if fill in DARK else INK, 11)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: int = 12, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        weight += f' style="font-size: {size}px"' if size != 12 else ""
        anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
        place = f'x="{x:.1f}" y="{y:.1f}"{anchored} fill="{fill}"{weight}'
        self.parts.append(f"<text {place}>{html.escape(text)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, width: float = 1.5) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {ends} stroke="{INK}" stroke-width="{width}"/>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        for colour, name in entries:
            self.rectangle(x, y - 10, 12, 12, colour)
            self.text(x + 16, y, name, size=11)
            x += 34 + 6.2 * len(name)

    def __str__(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
        style = "<style>rect { stroke: white; stroke-width: 0.7 } text { font-size: 12px }</style>"
        white = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join([head, style, white, *self.parts, "</svg>", ""])


def readable(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} G{unit}"


def zero_levels() -> Drawing:
    """The memory of a rank at its peak, by owner, at every ZeRO level: what ``bmtrain plan`` computes."""
    model = load_model("gpt2-medium")
    gpus, batch = 8, 2
    job = Job(gpus, 80e9, batch, 1024, torch.bfloat16, DEVICES["a100"])
    peaks = [estimate(model, job, Settings(zero=level, micro_batches=batch)).peak for level in range(4)]
    owners = {
        "parameters": BLUE,
        "gradients": RED,
        "state": ORANGE,
        "gathered": SKY,
        "activations": GREY,
    }
    names = {"state": "optimizer state", "gathered": "unsharded for now", "activations": "activations and temporaries"}
    drawing = Drawing(760, 250)
    title = f"Memory of one of {gpus} GPUs at its peak: gpt2-medium, bf16, Adam, {batch} micro-batches of 1024 tokens"
    drawing.text(20, 26, title, bold=True)
    scale = 560 / max(peak.total for peak in peaks)
    for level, peak in enumerate(peaks):
        x, y = 90.0, 48 + 40 * level
        drawing.text(20, y + 19, f"ZeRO {level}")
        for owner, colour in owners.items():
            size = getattr(peak, owner)
            if size:
                label = f"{size / 1e9:.2f}"
                drawing.rectangle(x, y, size * scale, 28, colour, label if size * scale > 32 else "")
            x += size * scale
        drawing.text(x + 8, y + 19, f"{peak.total / 1e9:.2f} GB", bold=True)
    drawing.legend(20, 230, [(colour, names.get(owner, owner)) for owner, colour in owners.items()])
    return drawing


def flat_buffer() -> Drawing:
    """A flat buffer of four shards, as the planner lays it out."""
    shapes = {"up.weight": (7, 5), "down.weight": (5, 7), "up.bias": (7,), "norm.weight": (5,)}
    ranks = 4
    [layout] = plan_layouts(list(shapes.values()), ranks)
    names = list(shapes)
    unit = 700 / layout.numel
    drawing = Drawing(760, 230)
    title = f"One flat buffer of {layout.numel} elements for {ranks} ranks: every cut is between two rows"
    drawing.text(20, 26, title, bold=True)
    y = 62
    for start, stop in layout.gaps:
        drawing.rectangle(20 + start * unit, y, (stop - start) * unit, 44, PALE)
    for placement in layout.placements:
        colour = COLOURS[placement.index]
        for row in range(placement.rows):
            x = 20 + (placement.offset + row * placement.row_numel) * unit
            drawing.rectangle(x, y, placement.row_numel * unit, 44, colour)
    for rank in range(ranks + 1):
        x = 20 + rank * layout.shard_numel * unit
        drawing.line(x, y - 10, x, y + 54, 2.5)
    for rank in range(ranks):
        x = 20 + rank * layout.shard_numel * unit
        drawing.text(x + layout.shard_numel * unit / 2, y - 6, f"rank {rank}", "middle")
        held = [(p, *layout.rows_of(p, rank)) for p in layout.placements]
        lines = [f"{names[p.index]}[{start}:{stop}]" for p, start, stop in held if start < stop]
        for number, line in enumerate(lines):
            drawing.text(x + 6, y + 72 + 16 * number, line, size=11)
    shown = [(COLOURS[i], f"{name} {tuple(shape)}") for i, (name, shape) in enumerate(shapes.items())]
    drawing.legend(20, 215, [*shown, (PALE, "padding")])
    return drawing


KINDS = {
    Kind.FORWARD: (BLUE, "forward"),
    Kind.RECOMPUTE: (YELLOW, "recomputation"),
    Kind.BACKWARD: (RED, "backward"),
    Kind.INPUT: (ORANGE, "input gradients"),
    Kind.WEIGHT: (GREEN, "weight gradients"),
}


def timelines() -> Drawing:
    """The schedules of a pipeline of four stages and eight micro-batches, simulated."""
    stages, micro_batches = 4, 8
    panels = [
        ("recompute (the default: the loss is outside)", "recompute", 1),
        ("1f1b", "1f1b", 1),
        ("interleaved_1f1b, two chunks per stage", "interleaved_1f1b", 2),
        ("zero_bubble_h1", "zero_bubble_h1", 1),
        ("zero_bubble_v, two chunks per stage", "zero_bubble_v", 2),
    ]
    made = [make_schedule(name, stages, micro_batches, chunks) for _, name, chunks in panels]
    drawn = [simulate(schedule) for schedule in made]
    unit = 640 / max(float(timeline.length) for timeline in drawn)
    drawing = Drawing(790, 40 + 112 * len(panels))
    for number, ((title, _, _), schedule, timeline) in enumerate(zip(panels, made, drawn, strict=True)):
        top = 26 + 112 * number
        idle = max(idle_share(timeline))
        held = max(timeline.activations), max(timeline.inputs)
        parts = f"{held[0]} micro-batch{'es' * (held[0] > 1)} of activations per chunk" if schedule.chunks == 1 else ""
        parts = parts or f"{held[0]} chunk{'s' * (held[0] > 1)} of activations"
        note = f"idle {idle:.0%}, at most {parts}" + (f" and {held[1]} stage inputs" if held[1] else "")
        drawing.text(70, top, title, bold=True)
        drawing.text(710, top, note, "end", size=11)
        for rank in range(stages):
            y = top + 8 + 20 * rank
            drawing.text(20, y + 13, f"rank {rank}", size=11)
            drawing.rectangle(70, y, float(timeline.length) * unit, 18, PALE)
            actions = zip(schedule.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
            for action, start, end in actions:
                width = float(end - start) * unit
                label = str(action.micro_batch) if width > 9 else ""
                drawing.rectangle(70 + float(start) * unit, y, width, 18, KINDS[action.kind][0], label)
    drawing.legend(70, 30 + 112 * len(panels), [*KINDS.values(), (PALE, "waiting")])
    return drawing


def sent_by(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> list[tuple[str, int]]:
    """What rank 0 of four sends or receives in the last of ``steps`` steps: a collective and its bytes, in order."""
    sent: list[tuple[str, int]] = []

    class Recording(PlannedCommunicator):
        def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(("all-reduce", 2 * (self.size - 1) * tensor.nbytes // self.size))
            return super().all_reduce(tensor, *args, **kwargs)

        def send_recv(self, sends: Any, recvs: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(("send, receive", max(sum(t.nbytes for t, _ in pairs) for pairs in (sends, recvs))))
            for tensor, _ in recvs:
                tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
            return DONE

    with planned_context(4, device="cpu") as context:
        for comm in {context.world, context.zero, context.tp_zero, context.outer_zero, context.outer_tp_zero}:
            comm.__class__ = Recording
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(6)])
        shard(model)
        optimizer = make(model)
        for _ in range(steps):
            sent.clear()
            for param in model.parameters():
                param.grad = torch.randn(param.to_local().shape)
            optimizer.step()
    return sent


def optimizer_rounds() -> Drawing:
    """The messages of one step of each optimizer."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [param for param in model.parameters() if len(param.logical_shape) == 2]

    def galore(model: nn.Module) -> torch.optim.Optimizer:
        return bmt_optim.GaLoreAdamW(bmt_optim.get_galore_param_groups(model, 0.0, rank=32), nbits=32)

    rows: list[tuple[str, Callable[[nn.Module], torch.optim.Optimizer], int]] = [
        ("AdamW, Lion", lambda model: bmt_optim.AdamW(model.parameters()), 1),
        ("LAMB", lambda model: bmt_optim.Lamb(model.parameters()), 1),
        ("Adafactor", lambda model: bmt_optim.Adafactor(model.parameters()), 1),
        ("CAME", lambda model: bmt_optim.CAME(model.parameters(), lr=1e-3), 1),
        ("Muon", lambda model: bmt_optim.Muon(matrices(model)), 1),
        ("GaLore", galore, 2),
        ("GaLore, renewing", galore, 1),
    ]
    drawing = Drawing(760, 74 + 38 * len(rows) + 30)
    title = "What rank 0 of 4 sends or receives in one step over six layers of 384 × 384: one packed message per round"
    drawing.text(20, 26, title, bold=True)
    for number, (name, make, steps) in enumerate(rows):
        y = 44 + 38 * number
        sent = sent_by(make, steps)
        drawing.text(20, y + 19, name)
        x = 150.0
        drawing.rectangle(x, y, 60, 28, PALE, "compute")
        for what, count in sent:
            x += 62
            drawing.rectangle(x, y, 120, 28, BLUE if what == "all-reduce" else ORANGE, readable(count))
            x += 122
            drawing.rectangle(x, y, 22, 28, PALE)
            x -= 40
        if not sent:
            drawing.text(224, y + 19, "no messages", size=11)
    entries = [(BLUE, "all-reduce of statistics"), (ORANGE, "matrices to their owners, or results back")]
    drawing.legend(20, 74 + 38 * len(rows) + 10, [*entries, (PALE, "computation")])
    return drawing


def checkpoint_files() -> Drawing:
    """The files of a checkpoint that is made for this, and which rank writes which piece of a larger one."""
    with tempfile.TemporaryDirectory() as folder:
        bmt.init_distributed()
        try:
            model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)))
            optimizer = bmt.optim.AdamOptimizer(model.parameters())
            manager = bmt.optim.OptimManager()
            manager.add_optimizer(optimizer)
            checkpointer = bmt.Checkpointer(folder)
            checkpointer.save(1000, model=model, manager=manager)
            checkpointer.wait()
            [step] = Path(folder).glob("step-*")
            files = sorted(path.name for path in step.iterdir())
            name = step.name
        finally:
            bmt.shutdown()
    shapes = {"layers.0.weight": (700, 1024), "layers.1.weight": (900, 1024), "norm.weight": (1024,)}
    ranks = 4
    [layout] = plan_layouts(list(shapes.values()), ranks)
    [file] = lay_out("model", [Entry(name, "F32", shape) for name, shape in shapes.items()])
    space = AddressSpace([file])

    def holdings(rank: int) -> Iterator[Holding]:
        for placement in layout.placements:
            start, stop = layout.rows_of(placement, rank)
            where = Slice(placement.shape, start, stop, None)
            regions = regions_of(where, 4)
            if regions:
                yield Holding(space.number["model", list(shapes)[placement.index]], tuple(regions))

    groups = replicate_groups({rank: tuple(holdings(rank)) for rank in range(ranks)})
    owners = {
        task.piece: task.owner
        for rank in range(ranks)
        for task in WritePlan(space, groups, frozenset(), rank).tasks()
        if task.owner == rank
    }
    about = {
        "model": "the weights: what from_pretrained and safetensors read",
        "optimizer": "states of the optimizer, unsharded",
        "index": "which file has which tensor",
        "rng": "random generators of each rank",
        "trainer": "options, schedules, loss scale",
        "manifest": "sizes and checksums: written last",
    }
    drawing = Drawing(760, 64 + 20 * len(files) + 130)
    drawing.text(20, 26, f"Files of {name}", bold=True)
    for number, entry in enumerate(files):
        y = 50 + 20 * number
        drawing.text(36, y, entry)
        kind = "index" if entry.endswith("index.json") else entry.replace(".", "-").partition("-")[0]
        drawing.text(330, y, about[kind], size=11)
    top = 80 + 20 * len(files)
    title = f"A model file of {file.size / 1e6:.1f} MB, written by {ranks} ranks in pieces of {PIECE >> 20} MiB"
    drawing.text(20, top, title, bold=True)
    unit = 700 / file.size
    for entry, offset, colour in zip(file.entries, file.offsets, (SKY, YELLOW, PURPLE), strict=True):
        width = entry.nbytes * unit
        drawing.rectangle(20 + offset * unit, top + 14, width, 24, colour, entry.name if width > 100 else "")
    for piece, owner in sorted(owners.items()):
        low, high = space.piece_range(piece)
        drawing.rectangle(20 + low * unit, top + 48, (high - low) * unit, 24, COLOURS[owner], str(owner))
    drawing.text(20, top + 92, "above: where tensors lie in the file; below: the rank that writes each piece", size=11)
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "zero-levels": zero_levels,
    "flat-buffer": flat_buffer,
    "pipeline-timelines": timelines,
    "optimizer-rounds": optimizer_rounds,
    "checkpoint-files": checkpoint_files,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PICTURES)}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    changed = []
    for name in arguments.names or PICTURES:
        path, text = IMAGES / f"{name}.svg", str(PICTURES[name]())
        if not path.exists() or path.read_text() != text:
            changed.append(path.name)
            if not arguments.check:
                path.write_text(text)
    if changed and arguments.check:
        print(f"{', '.join(changed)}: not what the code draws; run python docs/pictures.py")
        return 1
    print(f"changed: {', '.join(changed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
