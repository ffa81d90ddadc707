"""``config``, ``rank()`` and ``world_size()``."""

import pytest

import bmt_comm
from bmt_comm import config

# The names that BMTrain scripts look up.
KEYS = [
    "rank",
    "local_rank",
    "world_size",
    "local_size",
    "pipe_size",
    "tp_size",
    "zero_size",
    "tp_zero_size",
    "tp_rank",
    "zero_rank",
    "tp_zero_rank",
    "micros",
    "topology",
    "initialized",
    "comm",
    "zero_comm",
    "tp_comm",
    "pipe_comm",
    "tp_zero_comm",
    "pp_zero_comm",
    "pp_tp_zero_comm",
    "load_stream",
    "calc_stream",
]


def test_before_init_there_is_only_initialized():
    assert dict(config) == {"initialized": False}
    assert len(config) == 1
    assert "rank" not in config
    assert config.get("tp_size", 1) == 1
    with pytest.raises(KeyError, match="there is none before init_distributed"):
        config["rank"]
    for function in (bmt_comm.rank, bmt_comm.world_size):
        with pytest.raises(RuntimeError, match=r"call init_distributed\(\) first"):
            function()


@pytest.mark.ranks(4, pipe_size=2, tp_size=2, num_micro_batches=6)
def test_every_key_of_a_pipeline_with_tensor_parallelism(ctx):
    assert set(KEYS) <= set(config)
    assert len(config) == len(dict(config))
    assert bmt_comm.rank() == config["rank"] == ctx.rank
    assert bmt_comm.world_size() == config["world_size"] == 4
    assert (config["initialized"], config["pipe_enabled"], config["micros"], config["topology"]) == (True, True, 6, ctx)
    assert (config["pipe_size"], config["tp_size"], config["tp_rank"]) == (2, 2, ctx.rank % 2)
    assert (config["local_size"], config["local_rank"]) == (4, ctx.rank)
    # Outside the pipeline parameters are sharded over all stages; pp_… is inside one stage.
    assert (config["zero_size"], config["zero_rank"]) == (4, ctx.rank)
    assert (config["tp_zero_size"], config["tp_zero_rank"]) == (2, ctx.rank // 2)
    members = {key: config[key].ranks for key in KEYS if key.endswith("comm")}
    stage, column = ctx.rank // 2 * 2, ctx.rank % 2
    assert members == {
        "comm": (0, 1, 2, 3),
        "zero_comm": (0, 1, 2, 3),
        "tp_comm": (stage, stage + 1),
        "pipe_comm": (column, column + 2),
        "tp_zero_comm": (column, column + 2),
        "pp_zero_comm": (stage, stage + 1),
        "pp_tp_zero_comm": (ctx.rank,),
    }
    if ctx.device.type == "cpu":
        assert config["load_stream"] is None
        assert config["calc_stream"] is None
    assert "'tp_size': 2" in repr(config)


@pytest.mark.ranks(1)
def test_it_is_read_only_and_knows_no_other_keys(ctx):
    with pytest.raises(TypeError, match="does not support item assignment"):
        config["rank"] = 1
    with pytest.raises(KeyError):
        config["ranks"]
    assert "ranks" not in config
