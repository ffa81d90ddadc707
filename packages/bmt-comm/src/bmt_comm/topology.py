"""The names under which BMTrain scripts ask ``config["topology"]`` for this rank's place."""

from __future__ import annotations


class TopologyNames:
    """Index (``..._idx``: which group) and rank (``..._id``: which member of it) in each kind of group.

    ============ =======================================================================
    group        ranks
    ============ =======================================================================
    pipe         those of all stages with the same place in their stage
    tp           the tensor-parallel ranks that work on the same data
    zero         all
    tp_zero      those with the same tensor index, of all stages
    pp_zero      those of one stage
    pp_tp_zero   those of one stage with the same tensor index
    ============ =======================================================================
    """

    rank: int
    world_size: int
    pipe_size: int
    tp_size: int

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pipe_size

    @property
    def stage_id(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // (self.world_size // self.pipe_size)

    @property
    def pipe_idx(self) -> int:
        """This rank's place in its stage, which is the number of its pipeline."""
        return self.rank % (self.world_size // self.pipe_size)

    @property
    def tp_id(self) -> int:
        """This rank's place among its tensor-parallel ranks."""
        return self.rank % self.tp_size

    @property
    def tp_idx(self) -> int:
        """The number of this rank's group of tensor-parallel ranks."""
        return self.rank // self.tp_size

    @property
    def zero_id(self) -> int:
        return self.rank

    @property
    def zero_idx(self) -> int:
        return 0

    @property
    def tp_zero_id(self) -> int:
        return self.tp_idx

    @property
    def tp_zero_idx(self) -> int:
        return self.tp_id

    @property
    def pp_zero_id(self) -> int:
        return self.pipe_idx

    @property
    def pp_zero_idx(self) -> int:
        return self.stage_id

    @property
    def pp_tp_zero_id(self) -> int:
        return self.pipe_idx // self.tp_size

    @property
    def pp_tp_zero_idx(self) -> int:
        return self.stage_id * self.tp_size + self.tp_id

    def get_group_id(self, group_name: str) -> int:
        """Which group of the kind ``group_name`` (see above) this rank is in.

        Raises:
            ValueError: there is no such kind.
        """
        return self._look_up(group_name, 0)

    def get_group_rank(self, group_name: str) -> int:
        """This rank's place in its group of the kind ``group_name``.

        Raises:
            ValueError: there is no such kind.
        """
        return self._look_up(group_name, 1)

    def _look_up(self, group_name: str, which: int) -> int:
        places = {
            "pipe": (self.pipe_idx, self.stage_id),
            "tp": (self.tp_idx, self.tp_id),
            "zero": (self.zero_idx, self.zero_id),
            "tp_zero": (self.tp_zero_idx, self.tp_zero_id),
            "pp_zero": (self.pp_zero_idx, self.pp_zero_id),
            "pp_tp_zero": (self.pp_tp_zero_idx, self.pp_tp_zero_id),
        }
        if group_name not in places:
            raise ValueError(f"group_name={group_name!r} is not a kind of group; choose one of {', '.join(places)}")
        return places[group_name][which]
