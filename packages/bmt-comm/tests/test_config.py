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


def test_before_init_a_process_is_by_itself(capsys):
    assert (config["initialized"], bmt_comm.rank(), bmt_comm.world_size()) == (False, 0, 1)
    ranks, sizes = [k for k in KEYS if k.endswith("rank")], [k for k in KEYS if k.endswith("size")]
    assert [config[k] for k in ranks] == [0] * len(ranks)
    assert [config[k] for k in sizes] == [1] * len(sizes)
    assert len(config) == len(dict(config))
    assert "comm" not in config
    assert config.get("topology") is None
    with pytest.raises(KeyError, match="there is none before init_distributed"):
        config["comm"]
    bmt_comm.print_rank("this process")
    bmt_comm.print_rank("another one", rank=1)
    bmt_comm.see_memory("now")
    assert capsys.readouterr().out.startswith("this process\n=")


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(("pipe", "tp"), [(2, 2), (2, 1), (1, 2)])
def test_the_topology_has_the_names_of_bmtrain(pipe, tp, device_type):
    ctx = bmt_comm.init_distributed(pipe_size=pipe, tp_size=tp, device=device_type)
    topology = config["topology"]
    of_stage = 4 // pipe
    assert (topology.rank, topology.stages, topology.stage_id) == (ctx.rank, pipe, ctx.rank // of_stage)
    assert (topology.pipe_idx, topology.tp_id, topology.tp_idx) == (ctx.rank % of_stage, ctx.rank % tp, ctx.rank // tp)
    assert (topology.pp_zero_id, topology.pp_zero_idx) == (ctx.rank % of_stage, ctx.rank // of_stage)
    assert (topology.zero_id, topology.zero_idx) == (ctx.rank, 0)
    groups = {
        "pipe": "pipe_comm",
        "zero": "zero_comm",
        "tp": "tp_comm",
        "tp_zero": "tp_zero_comm",
        "pp_zero": "pp_zero_comm",
        "pp_tp_zero": "pp_tp_zero_comm",
    }
    for name, key in groups.items():
        assert topology.get_group_rank(name) == config[key].rank
        # Ranks with the same index are those of the communicator.
        indices = ctx.world.all_gather_object(topology.get_group_id(name))
        assert tuple(r for r in range(4) if indices[r] == indices[ctx.rank]) == config[key].ranks
    with pytest.raises(ValueError, match="'data' is not a kind of group; choose one of pipe, tp"):
        topology.get_group_rank("data")


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
