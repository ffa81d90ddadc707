"""The recipes for other libraries' training loops give the losses of plain PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bmt_zero

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.append(str(Path(__file__).parents[1] / "examples" / "recipes"))

STEPS, ROWS = 20, 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_hugging_face_gives_the_losses_of_plain_pytorch(
    ctx: Any, tmp_path: Path, accumulation: int
) -> None:
    from hugging_face_trainer import ShardedTrainer
    from torch.utils.data import SequentialSampler
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=37, max_position_embeddings=16))
    plain = copy.deepcopy(model)
    ids = torch.randint(1, 37, (STEPS * ROWS * ctx.world_size, 10), generator=torch.Generator().manual_seed(1))

    class InOrder(ShardedTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=STEPS, per_device_train_batch_size=ROWS // accumulation, learning_rate=1e-2,
        gradient_accumulation_steps=accumulation, use_cpu=True, lr_scheduler_type="constant", logging_steps=1,
        max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    trainer = InOrder(model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)  # which a wrong factor of gradients changes
    wanted = []
    for batch in ids.split(ROWS * ctx.world_size):
        loss = plain(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, abs=2e-4)  # the Trainer rounds what it logs
    assert wanted[-1] < wanted[0]

    trainer.save_model(str(tmp_path / "saved"))
    ctx.world.barrier()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for name, param in plain.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), param, rtol=1e-3, atol=1e-4)


SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 37}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=16))


def trainer_of(model: Any, folder: Path, data: Any, **settings: Any) -> Any:
    from hugging_face_trainer import ShardedTrainer
    from torch.utils.data import SequentialSampler
    from transformers import TrainingArguments

    class InOrder(ShardedTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    given = {
        "save_strategy": "no",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    arguments = TrainingArguments(str(folder), use_cpu=True, **{**given, **quiet, **settings})
    return InOrder(model, args=arguments, train_dataset=data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_whose_numbers_of_labels_differ(ctx: Any, tmp_path: Path, accumulation: int) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    ids = torch.randint(1, 37, (16, 10), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for number, row in enumerate(labels):
        row[: 7 if number % 4 < 2 else 1] = -100
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    rate = 0.5  # updates are far above the rounding of weights
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 4 // accumulation, "learning_rate": rate}
    trainer_of(model, tmp_path, data, optim="sgd", **settings).train()
    start = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
    for rows, wanted in zip(ids.split(4 * accumulation), labels.split(4 * accumulation), strict=True):
        optimizer.zero_grad()
        plain(input_ids=rows, labels=wanted).loss.backward()
        optimizer.step()
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        update = value - start[name]
        assert (found[name] - start[name] - update).norm() <= 2e-5 * update.norm(), name


@pytest.mark.ranks(2)
def test_the_trainer_saves_and_resumes_and_computes_in_bf16(ctx: Any, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    ids = torch.randint(1, 37, (16, 10), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    whole = llama()
    dtypes = set()
    whole.lm_head.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    trainer_of(whole, tmp_path / "a", data, bf16=True, save_strategy="steps", save_steps=2).train()
    assert dtypes == {torch.bfloat16}
    resumed = llama()
    trainer_of(resumed, tmp_path / "b", data, bf16=True).train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    found = resumed.state_dict()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4").state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(found[name], value), name
        assert torch.equal(saved[name], value), name
    with pytest.raises(ValueError, match="fp16 and torch_compile are not for sharded models"):
        trainer_of(llama(), tmp_path, data, torch_compile=True)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which peft reads
def test_the_trainer_saves_adapters(ctx: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(1, 37, (16, 10), generator=torch.Generator().manual_seed(1))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    trainer = trainer_of(model, tmp_path / "run", [{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    ctx.world.barrier()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with bmt_zero.gathered_parameters(model):
        merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ctx.world.barrier()
    saved = type(llama()).from_pretrained(tmp_path / "merged")
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, saved(input_ids=ids).logits)


@pytest.mark.ranks(2, init=False)
def test_the_script_beside_accelerate_has_the_losses_of_plain_pytorch() -> None:
    from accelerate.state import AcceleratorState
    from accelerate_script import ROWS, STEPS, build, data, train

    AcceleratorState._reset_state(True)
    losses = train(cpu=True)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = []
    for x, y in torch.utils.data.DataLoader(data(), batch_size=2 * ROWS):
        loss = (plain(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, rel=1e-4)
