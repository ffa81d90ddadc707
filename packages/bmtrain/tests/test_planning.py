"""Plans against what training steps on real ranks hold, and against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import bmt_tp
import bmtrain as bmt
from bmt_comm import Communicator
from bmtrain.command import main
from bmtrain.planning import DEVICES, Choices, Job, PlannedModel, Settings, estimate, load_model, search, trace
from bmtrain.planning.gpt import GPT, GPTSizes
from bmtrain.planning.models import ids_and_labels

SIZES = GPTSizes(vocab=512, sequence=32, layers=6, heads=4, hidden=64)


def planned(settings: Settings, ranks: int, batch: int, dtype: torch.dtype) -> float:
    """The peak by the plan."""
    with torch.device("meta"):
        model = PlannedModel("gpt", GPT(SIZES, tied=False), SIZES.sequence, ids_and_labels)
    job = Job(ranks, 1e9, batch, SIZES.sequence, dtype, DEVICES["cpu"])
    return estimate(model, job, settings).peak.total


def measured(settings: Settings, context: bmt.ParallelContext, batch: int, dtype: torch.dtype) -> float:
    """The peak bytes of torch's allocator in a training step after the first, on the rank with the most."""
    job = Job(context.world_size, 1e9, batch, 1, dtype, DEVICES["cpu"])
    sequences = batch * settings.tp if settings.pipe > 1 else settings.micro_batch(job)
    gc.collect()  # what earlier models have left must not be released while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = GPT(SIZES, tied=False).to(dtype)
        if settings.tp > 1:
            bmt_tp.parallelize(model, model.tp_plan)
        if settings.pipe > 1:
            blocks = [bmt.Block(x, settings.checkpoint, settings.zero) for x in model.layers]
            model.layers = _Called(bmt.PipelineTransformerBlockList(blocks))
        model = bmt.BMTrainModelWrapper(model, use_checkpoint=settings.checkpoint, zero_level=settings.zero)
        optimizer = bmt.optim.AdamOptimizer(model.parameters())
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        ids = torch.zeros(sequences, SIZES.sequence, dtype=torch.long)
        for step in range(2):
            with record_function(f"step {step}"):
                manager.zero_grad()
                for index in range(settings.accumulation):
                    last = index == settings.accumulation - 1
                    with contextlib.nullcontext() if last else bmt.no_sync(model):
                        model(ids, ids).backward()
                manager.step()
    peak = torch.tensor(_most_allocated(profiler, "step 1"))
    context.world.all_reduce(peak, "max")
    return peak.item()


class _Called(torch.nn.Module):
    """A list of layers that the model's loop calls as one layer."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.inner = layers

    def __iter__(self):
        return iter([self.inner])


def _most_allocated(profiler: profile, within: str) -> float:
    events = profiler.profiler.kineto_results.events()
    start, stop = next((e.start_ns(), e.end_ns()) for e in events if e.name() == within)
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        if start <= event.start_ns() <= stop:
            most = max(most, held)
    return float(most)


def check(ctx: bmt.ParallelContext, layouts: list[tuple[Settings, int, torch.dtype]]) -> None:
    peaks = [measured(settings, ctx, batch, dtype) for settings, batch, dtype in layouts]
    bmt.shutdown()
    plans = [planned(settings, ctx.world_size, batch, dtype) for settings, batch, dtype in layouts]
    errors = {str(layout): plan / peak - 1 for layout, plan, peak in zip(layouts, plans, peaks, strict=True)}
    print(errors)
    assert max(map(abs, errors.values())) <= 0.05, errors


@pytest.mark.ranks(2)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_the_peak_of_a_plan_is_within_5_percent(ctx):
    check(
        ctx,
        [
            (Settings(zero=3, checkpoint=True), 8, torch.bfloat16),
            (Settings(zero=2, checkpoint=False, micro_batches=2), 4, torch.float32),
        ],
    )


@pytest.mark.thorough
@pytest.mark.ranks(2)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_the_peak_at_other_levels(ctx):
    check(
        ctx,
        [
            (Settings(zero=3, checkpoint=False), 8, torch.float32),
            (Settings(zero=2, checkpoint=True), 4, torch.float32),
            (Settings(zero=1, checkpoint=False), 2, torch.float32),
            (Settings(zero=1, checkpoint=True, micro_batches=4), 8, torch.float32),
            (Settings(zero=0, checkpoint=True), 8, torch.float32),
            (Settings(zero=0, checkpoint=False, micro_batches=2), 2, torch.bfloat16),
        ],
    )


@pytest.mark.thorough
@pytest.mark.ranks(4, tp_size=2)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_the_peak_of_tensor_parallel_ranks(ctx):
    check(
        ctx,
        [
            (Settings(zero=3, tp=2, checkpoint=False), 8, torch.float32),
            (Settings(zero=2, tp=2, checkpoint=True), 4, torch.bfloat16),
        ],
    )


@pytest.mark.thorough
@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_the_peak_of_a_pipeline(ctx):
    check(
        ctx,
        [
            (Settings(zero=3, pipe=2, checkpoint=True, micro_batches=4), 8, torch.float32),
            (Settings(zero=2, pipe=2, checkpoint=True, micro_batches=4), 4, torch.bfloat16),
        ],
    )


def test_layers_beyond_those_traced_add_what_they_would(monkeypatch):
    with torch.device("meta"):
        model = PlannedModel("gpt", GPT(SIZES), SIZES.sequence, ids_and_labels)
    job = Job(8, 1e9, 4, SIZES.sequence, torch.bfloat16, DEVICES["a100"])
    for settings in (Settings(zero=3), Settings(zero=1, micro_batches=4), Settings(zero=2, tp=2, checkpoint=False)):
        few = estimate(model, job, settings)
        assert few == estimate(model, job, settings)
        monkeypatch.setattr(trace, "_DEPTH", 100)
        every = estimate(model, job, settings)
        monkeypatch.undo()
        assert few.peak.total == every.peak.total
        assert few.sent == pytest.approx(every.sent, rel=1e-4)  # bytes of collectives are rounded down
        assert few.seconds == pytest.approx(every.seconds)


def gpt() -> PlannedModel:
    with torch.device("meta"):
        return PlannedModel("gpt", GPT(SIZES, tied=False), SIZES.sequence, ids_and_labels)


def test_micro_batches_of_a_pipeline_gather_only_the_layers_again():
    model, batch = gpt(), 8

    def sent(ranks: int, micro_batches: int) -> float:
        job = Job(ranks, 1e9, batch, SIZES.sequence, torch.bfloat16, DEVICES["a100"])
        return estimate(model, job, Settings(zero=3, pipe=2, micro_batches=micro_batches)).sent["data"]

    assert sent(2, 2) == sent(2, 8) > 0  # a stage is one rank: only embedding and head are sharded
    # Forward, recomputation and reduction of a layer each send half of 2 bytes for each parameter. The last of the 3
    # layers is not gathered again.
    assert sent(4, 8) - sent(4, 2) == pytest.approx(6 * (3 * 3 - 1) * model.layer_trained, rel=0.01)


@pytest.mark.parametrize("zero", [0, 1])
def test_backward_passes_that_accumulate_send_nothing_beyond_the_first_gather(zero):
    job = Job(8, 1e9, 12, SIZES.sequence, torch.bfloat16, DEVICES["a100"])
    model = gpt()
    two, three, four = (estimate(model, job, Settings(zero=zero, micro_batches=n)).sent["data"] for n in (2, 3, 4))
    assert two == pytest.approx(three, rel=1e-3)  # flags of a few bytes apart
    assert three == pytest.approx(four, rel=1e-3)


def test_micro_batches_divide_the_batch():
    job = Job(4, 1e9, 6, SIZES.sequence, torch.bfloat16, DEVICES["cpu"])
    with pytest.raises(ValueError, match="micro_batches=4 does not divide a batch of 6 sequences"):
        estimate(gpt(), job, Settings(micro_batches=4))
    estimates = search(gpt(), job, Choices(tp=[1, 1], pipe=[1, 2], micro_batches=[8, 3, 2], optimizers=["adam"] * 2))
    assert len({each.settings for each in estimates}) == len(estimates)
    assert {each.settings.pipe: each.settings.micro_batches for each in estimates} == {1: 2, 2: 2}
    proposed = search(gpt(), dataclasses.replace(job, device_memory=7e5), Choices(tp=[1], pipe=[1, 2]))
    assert {each.settings.pipe for each in proposed} == {1, 2}


def test_sequences_are_no_longer_than_the_positions_of_the_model():
    job = Job(4, 80e9, 1, 2048, torch.bfloat16, DEVICES["a100"])
    with pytest.raises(ValueError, match="2048 tokens are more than the 1024 positions of gpt2"):
        estimate(load_model("gpt2"), job, Settings())


def test_jobs_and_settings_that_cannot_be_are_refused():
    job = Job(4, 1e9, 6, SIZES.sequence, torch.bfloat16, DEVICES["cpu"])
    for name in ("world_size", "device_memory", "batch", "sequence", "node_size", "network"):
        with pytest.raises(ValueError, match=f"{name}=0 must be positive"):
            dataclasses.replace(job, **{name: 0})
    with pytest.raises(ValueError, match="pipe=0 must be positive"):
        Settings(pipe=0)
    with pytest.raises(ValueError, match="optimizer='sgd' is not planned; choose one of adam, "):
        search(gpt(), job, Choices(optimizers=["sgd"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--micro-batches 2 0", "--micro-batches 0 must be positive"),
        ("--tp 0", "--tp 0 must be positive"),
        ("--pipe -2", "--pipe -2 must be positive"),
        ("--flops 0", "--flops 0.0 must be positive"),
        ("--network 0", "--network 0.0 must be positive"),
        ("--node-link 0", "--node-link 0.0 must be positive"),
        ("--tp 3 --pipe 1", "no product of tp and pipe divides the number of devices"),
        ("--pipe 2 --micro-batches 3", "micro_batches=3 is no multiple of the 2 stages"),
        ("--sequence 4096", "4096 tokens are more than the 128 positions of small-cpu"),
        ("--gpus 1000000000", "--gpus 1000000000 is more than the 1000000 devices that can be planned"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    assert main(["plan", "small-cpu", "--gpus", "4", "--gpu-memory", "1GB", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_function_that_fails_is_named(capsys):
    assert main(["plan", "torch.nn:Linear", "--gpus", "4", "--gpu-memory", "1GB"]) == 2
    assert "MODEL 'torch.nn:Linear': the call failed: TypeError: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("three", "must return a module, or a module and a function that makes a batch"),
        ("no_batch", "must return a module, or a module and a function that makes a batch"),
        ("bad_batch", "the batch of models_of_mine:bad_batch must be (args, kwargs)"),
    ],
)
def test_what_a_function_must_return_is_named(capsys, tmp_path, monkeypatch, function, message):
    (tmp_path / "models_of_mine.py").write_text(
        "from torch import nn\n"
        "three = lambda: (nn.Linear(4, 4), 1, 2)\n"
        "no_batch = lambda: (nn.Linear(4, 4), 5)\n"
        "bad_batch = lambda: (nn.Linear(4, 4), lambda batch, length: None)\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    sizes = ["--gpus", "4", "--gpu-memory", "1GB", "--tp", "1", "--pipe", "1"]
    assert main(["plan", f"models_of_mine:{function}", *sizes]) == 2
    assert message in capsys.readouterr().err
    assert main(["plan", "broken:f", *sizes]) == 2
    assert "MODEL 'broken:f': the import failed: SyntaxError: " in capsys.readouterr().err


def test_a_configuration_that_makes_no_model_is_named(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 30, "n_head": 7}))
    assert main(["plan", str(tmp_path), "--gpus", "4", "--gpu-memory", "1GB"]) == 2
    assert "transformers cannot make it: " in capsys.readouterr().err


def test_a_configuration_of_a_model_that_takes_no_tokens_is_named(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "2", "--gpu-memory", "1GB"]) == 2
    assert "ViTForImageClassification takes pixel_values, not input_ids and labels" in capsys.readouterr().err


def test_utilization_refers_to_what_the_vendor_names():
    """Forward and backward of the 124 M parameters of GPT-2 take 6 operations for each and a token."""
    for dtype, peak in ((torch.bfloat16, 312e12), (torch.float32, 19.5e12)):
        plan = estimate(load_model("gpt2"), Job(8, 80e9, 1, 1024, dtype, DEVICES["a100"]), Settings())
        assert plan.mfu == pytest.approx(6 * 124_439_808 * plan.tokens_per_second / (8 * peak), rel=1e-6)
        assert plan.mfu < 0.9


def test_a_model_far_too_large_is_reported_as_not_fitting(capsys):
    assert main(["plan", "small-cpu", "--gpus", "1", "--gpu-memory", "10kB"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_the_command_prints_settings_that_fit(capsys, tmp_path):
    arguments = ["plan", "small-cpu", "--gpus", "1024", "--gpu-memory", "1GB"]
    assert main([*arguments, "--tp", "1", "2", "--pipe", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpus"] == 1024
    first = plan["settings"][0]
    assert first["fits"]
    owners = ("parameters", "gradients", "state", "gathered", "activations")
    assert first["memory"]["peak"] == sum(first["memory"][owner] for owner in owners) < 1e9
    assert {each["tp"] for each in plan["settings"]} == {1, 2}
    assert main([*arguments[:-1], "10kB", "--tp", "1", "--pipe", "1"]) == 1
    assert "Nothing fits" in capsys.readouterr().out
    assert main([*arguments[:-1], "1GB", "--tp", "3", "--pipe", "1"]) == 2
    assert "no settings go together" in capsys.readouterr().err
    assert main(["plan", "no-such-model", *arguments[2:]]) == 2


def build() -> torch.nn.Module:
    """A model of a user: returns scores, and has no plan for tensor parallelism."""
    layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(5)]
    return torch.nn.Sequential(torch.nn.Embedding(50, 16), *layers, torch.nn.Linear(16, 50))


def test_a_model_of_a_user_is_planned(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = Job(4, 1e9, 2, 16, torch.float32, DEVICES["cpu"])
    user = load_model(f"{Path(__file__).stem}:build")
    assert user.depth == 5
    assert estimate(user, job, Settings()).peak.total > 0


def with_adapters() -> torch.nn.Module:
    """The embedding and most of each layer are frozen."""
    model = build()
    for name, param in model.named_parameters():
        param.requires_grad_("linear1.bias" in name)
    return model


def test_frozen_parameters_have_no_gradients_and_no_state(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = Job(4, 1e9, 2, 16, torch.float32, DEVICES["cpu"])
    adapted, full = (load_model(f"{Path(__file__).stem}:{name}") for name in ("with_adapters", "build"))
    assert (adapted.parameters, adapted.trained) == (full.parameters, 5 * 32)
    frozen, usual = (estimate(each, job, Settings(zero=0)) for each in (adapted, full))
    assert frozen.peak.gradients + frozen.peak.state <= 0.02 * (usual.peak.gradients + usual.peak.state)
    assert frozen.mfu * frozen.seconds == pytest.approx(usual.mfu * usual.seconds * 2 / 3, rel=0.01)
    assert estimate(adapted, dataclasses.replace(job, world_size=2), Settings(pipe=2, micro_batches=2)).peak.total > 0
    # Enough memory for level 0 with frozen parameters, and not enough to train all of them.
    memory = 1.01 * frozen.peak.total
    assert usual.peak.total > 1.5 * memory
    settings = search(adapted, dataclasses.replace(job, device_memory=memory), Choices(zero=(0, 3), tp=(1,), pipe=(1,)))
    assert {each.settings.zero for each in settings if each.fits(dataclasses.replace(job, device_memory=memory))} == {
        0,
        3,
    }


def failing() -> torch.nn.Module:
    class Fails(torch.nn.Linear):
        def forward(self, ids):
            raise RuntimeError("on purpose")

    return Fails(4, 4)


def test_a_model_whose_step_fails_is_named(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["plan", f"{Path(__file__).stem}:failing", "--gpus", "2", "--gpu-memory", "1GB"]) == 2
    assert "fails: RuntimeError: on purpose" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["80", "80B", "1.2.3GB", "much"])
def test_a_size_needs_a_unit(capsys, size):
    with pytest.raises(SystemExit):
        main(["plan", "small-cpu", "--gpus", "4", "--gpu-memory", size])
    assert f"{size!r} is no size; write 32GB or 80GiB" in capsys.readouterr().err


def test_a_learned_bias_of_attention_is_planned(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    job = Job(2, 1e9, 2, 16, torch.float32, DEVICES["cpu"])
    assert estimate(load_model(str(tmp_path)), job, Settings()).peak.total > 0


def hugging_face(path: Path, model_type: str, architecture: str, **sizes: object) -> PlannedModel:
    """A model of a configuration in ``path``."""
    pytest.importorskip("transformers")
    config = {"model_type": model_type, "architectures": [architecture], "vocab_size": 64, "hidden_size": 32, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    return load_model(str(path))


def test_models_without_fused_attention_are_planned(tmp_path):
    model = hugging_face(tmp_path, "bloom", "BloomForCausalLM", n_layer=2, n_head=4)
    assert estimate(model, Job(2, 1e9, 2, 16, torch.float32, DEVICES["cpu"]), Settings()).peak.total > 0


def test_values_of_another_size_than_keys_are_planned(tmp_path):
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "first_k_dense_replace": 2, "intermediate_size": 64, "num_attention_heads": 4}
    model = hugging_face(tmp_path, "deepseek_v3", "DeepseekV3ForCausalLM", num_key_value_heads=4, **sizes)
    assert estimate(model, Job(2, 1e9, 2, 16, torch.float32, DEVICES["cpu"]), Settings()).peak.total > 0


def test_the_printed_pipeline_names_the_layers_of_the_model(tmp_path):
    model = hugging_face(tmp_path, "mixtral", "MixtralForCausalLM", num_hidden_layers=2, num_attention_heads=4)
    assert any(line.startswith("model.model.layers = bmt.Pipe") for line in model.lines(Settings(pipe=2)))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch computes experts one by one")
def test_experts_compute_for_the_tokens_that_they_get(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
    model = hugging_face(tmp_path, "mixtral", "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2, **sizes)
    expert = 3 * 32 * 512
    used = model.parameters - 2 * 6 * expert
    device = dataclasses.replace(DEVICES["a100"], memory=1e30)  # only computation takes time
    plan = estimate(model, Job(2, 1e9, 2, 64, torch.bfloat16, device), Settings(checkpoint=False))
    assert plan.compute * device.flops == pytest.approx(6 * used * 2 * 64, rel=0.05)
    assert plan.mfu == pytest.approx(6 * used * plan.tokens_per_second / (2 * device.peak))


@pytest.mark.parametrize("optimizer", ["adam", "adam_offload", "adafactor", "lion"])
def test_the_printed_optimizer_can_be_made(optimizer):
    import bmt_optim

    line = Settings(optimizer=optimizer).lines()[-1]
    names = {"bmt": bmt, "bmt_optim": bmt_optim, "model": torch.nn.Linear(2, 2), "lr": 0.1}
    exec(line, names)
    assert isinstance(names["optimizer"], torch.optim.Optimizer)
