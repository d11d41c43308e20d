"""Description of a job: model, hardware and layout, as detector and scheduler need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ._numbers import checked, make_plain, number, whole_number, whole_numbers
from .errors import ContractError
from .faults import Protection
from .layout import Layout, Schedule

_MOST_LAYERS, _MOST_CHUNKS = 100_000, 256
_MOST_MICROBATCHES = 1 << 24  # 128 for each of 131,072 replicas
_LEAST_MS = 1e-30  # of a layer: products with shares and speeds stay above the least float
_MOST_MS = 1e15  # as in records: sums over microbatches stay below the largest float
_LEAST_GBYTES_PER_S = 1e-6


class Action(StrEnum):
    """Kind of change that a job can take on.

    layout   another layout with other quotas and another schedule, live
    quotas   other quotas in the layout that it has, live
    restart  any plan, by a restart
    notify   none by itself: advice for the person who runs it
    """

    LAYOUT = "layout"
    QUOTAS = "quotas"
    RESTART = "restart"
    NOTIFY = "notify"

    @classmethod
    def ordered(cls, actions: Iterable[str]) -> tuple[Action, ...]:
        """Distinct actions in the order above; only `notify` for none.

        Raises `ContractError` for another name.
        """
        given = list(actions)
        for action in given:
            if action not in tuple(cls):
                raise ContractError("actions", f"must be of {', '.join(cls)}, not {action!r}")
        return tuple(action for action in cls if action in given) or (cls.NOTIFY,)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer. `ffn` is the inner width; `gated` counts a third FFN matrix.

    `head_dim` is the width of one attention head; 0: hidden / heads.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    gated: bool = True
    head_dim: int = 0

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        make_plain(self, whole_number, *sizes, least=1)
        make_plain(self, whole_number, "head_dim", least=0)
        if self.heads % self.kv_heads:
            raise ContractError("kv_heads", f"must divide heads ({self.heads})")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ContractError("heads", f"must divide hidden ({self.hidden})")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer (norms included)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding table; the head has as many unless it is tied."""
        return self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Compute time of one mean microbatch on one device of speed 1 that holds the whole layer.

    A rank with share q of a layer needs `fixed_ms + q * forward_ms` (and the like for backward);
    `embedding_ms` and `head_ms` (forward; backward is twice that) weigh on the first and the last
    stage. `step_ms` is what every step costs besides its microbatches (optimizer, data). Every time
    is at most 1e15.
    """

    forward_ms: float
    backward_ms: float
    fixed_ms: float = 0.0
    embedding_ms: float = 0.0
    head_ms: float = 0.0
    step_ms: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, number, "forward_ms", "backward_ms", above=_LEAST_MS, most=_MOST_MS)
        others = ("fixed_ms", "embedding_ms", "head_ms", "step_ms")
        make_plain(self, number, *others, least=0.0, most=_MOST_MS)


@dataclass(frozen=True, kw_only=True)
class RankAmount:
    """Amount on a rank with share q of a stage: q * `split` + `whole`."""

    split: float = 0.0
    whole: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, number, "split", "whole", least=0.0)

    def of_share(self, share: float) -> float:
        """Amount on a rank with this share."""
        return share * self.split + self.whole


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory budget of a device and what a parameter and a microbatch cost.

    `budget_bytes` None means unlimited. A parameter costs `bytes_per_param` with its gradient and
    `optimizer_bytes_per_param` of optimizer state; where `sharded_optimizer`, replicas hold
    `optimizer_copies` of the latter between them, and no replica more than one. Activations:
    `activation_bytes_per_layer` for one microbatch of one whole layer; None derives it from the
    model shape and the tokens.

    Measured figures are finer, e.g. those of `resihp.elastic.measure_memory`:
    layer_params, first_params, last_params  parameters of a layer, of embedding and of head; in
                       place of those of the model shape
    layer_activations  what a layer keeps of a microbatch between its forward and backward pass, its
                       input included; takes the place of `activation_bytes_per_layer`
    first_activations  what the embedding keeps in addition to its output
    layer_pass         most that a pass through one layer needs on top of that, once; with
                       recomputation the layer's activations are part of it
    head_pass          the same for head and loss, with all that they keep
    layer_split, head_split  what a layer, and head and loss, keep of a microbatch between the
                       halves of a split backward pass; 0: as much as before the pass
    layer_split_pass, head_split_pass  most that such a pass needs on top of that; None: what is
                       left of `layer_pass` and `head_pass`
    boundary_bytes     output of a stage for one microbatch
    reduce_bytes_per_param  of gradients summed over replicas, when no activations are held
    update_bytes_per_param  of copies that the optimizer makes for an update of all parameters
    update             most that it needs besides
    """

    budget_bytes: int | None = None
    bytes_per_param: float = 4.0
    optimizer_bytes_per_param: float = 12.0
    sharded_optimizer: bool = False
    optimizer_copies: int = 1
    activation_bytes_per_layer: int | None = None
    layer_params: RankAmount | None = None
    first_params: RankAmount | None = None
    last_params: RankAmount | None = None
    layer_activations: RankAmount | None = None
    first_activations: RankAmount = field(default_factory=RankAmount)
    layer_pass: RankAmount = field(default_factory=RankAmount)
    head_pass: RankAmount = field(default_factory=RankAmount)
    layer_split: RankAmount = field(default_factory=RankAmount)
    head_split: RankAmount = field(default_factory=RankAmount)
    layer_split_pass: RankAmount | None = None
    head_split_pass: RankAmount | None = None
    boundary_bytes: float = 0.0
    reduce_bytes_per_param: float = 0.0
    update_bytes_per_param: float = 0.0
    update: RankAmount = field(default_factory=RankAmount)

    def __post_init__(self) -> None:
        make_plain(self, whole_number, "budget_bytes", least=1, optional=True)
        make_plain(self, whole_number, "activation_bytes_per_layer", least=0, optional=True)
        make_plain(self, whole_number, "optimizer_copies", least=1)
        make_plain(self, number, "bytes_per_param", "optimizer_bytes_per_param", least=0.0)
        make_plain(self, number, "reduce_bytes_per_param", "update_bytes_per_param", least=0.0)
        make_plain(self, number, "boundary_bytes", least=0.0)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidth (at least 1e-6) and latency (at most 1e15) between ranks of one node and of
    different nodes."""

    ranks_per_node: int = 8
    intra_gbytes_per_s: float = 200.0
    inter_gbytes_per_s: float = 25.0
    latency_ms: float = 0.01

    def __post_init__(self) -> None:
        make_plain(self, whole_number, "ranks_per_node", least=1)
        rates = ("intra_gbytes_per_s", "inter_gbytes_per_s")
        make_plain(self, number, *rates, least=_LEAST_GBYTES_PER_S)
        make_plain(self, number, "latency_ms", least=0.0, most=_MOST_MS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    layout                 the layout it starts with, of at most 100,000 layers
    microbatches           per step, over all replicas, at most 2^24; never changes
    quotas                 microbatches of each replica; empty means as even as they go
    model                  None where only timings are known (a foreign trace)
    tokens_per_microbatch  token budget of a microbatch
    schedule               the one that it starts with
    schedules              those that plans may choose from; the first where others gain nothing;
                           empty: only `schedule`, and where that is 1F1B and `memory` tells what
                           fits, its eager kind (the same passes, forwards earlier)
    chunks                 model chunks per stage, at most 256: more than 1 with the interleaved
                           schedule, and with zero bubble where a trace shows torch's V-shaped one
    max_in_flight          most microbatches of which a stage may hold activations; None: unlimited
    recompute              whether backward passes recompute activations
    device                 type of device, e.g. "H100"; predictors are shared per (model, device)
    cost                   measured times of a layer; None derives them from model and device
    memory, links          budget of a device and what training takes of it; the network
    protection             against faults; with it a dear change of layout has to pay until the next
    actions                what it can take on, in any order; plans use nothing else. `notify` is
                           possible in any case, and all that is left of an empty list
    """

    name: str
    layout: Layout
    microbatches: int
    quotas: tuple[int, ...] = ()
    model: ModelShape | None = None
    tokens_per_microbatch: int | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    schedules: tuple[Schedule, ...] = ()
    chunks: int = 1
    max_in_flight: int | None = None
    recompute: bool = False
    device: str = "cpu"
    cost: LayerCost | None = None
    memory: Memory = field(default_factory=Memory)
    links: Links = field(default_factory=Links)
    protection: Protection | None = None
    actions: tuple[Action, ...] = (Action.LAYOUT, Action.QUOTAS)

    def __post_init__(self) -> None:
        make_plain(self, whole_number, "microbatches", least=1, most=_MOST_MICROBATCHES)
        make_plain(self, whole_number, "chunks", least=1, most=_MOST_CHUNKS)
        limits = ("max_in_flight", "tokens_per_microbatch")
        make_plain(self, whole_number, *limits, least=1, optional=True)
        make_plain(self, whole_numbers, "quotas", least=0)
        make_plain(self, Schedule.named, "schedule")
        make_plain(self, _schedules, "schedules")
        object.__setattr__(self, "actions", Action.ordered(self.actions))
        object.__setattr__(self, "layout", self.layout.under(None))
        is_text = isinstance(self.name, str)
        if not is_text or not self.name or self.name != acceptable_name(self.name):
            problem = "must be 1 to 128 printable characters without a slash, and not '.' or '..'"
            raise ContractError("name", problem)
        if self.layout.layers < 1:
            raise ContractError("layout", "must hold at least one layer")
        if self.layout.layers > _MOST_LAYERS:
            raise ContractError("layout", f"must hold at most {_MOST_LAYERS} layers")
        if self.model is not None and self.model.layers != self.layout.layers:
            raise ContractError(
                "layout", f"holds {self.layout.layers} layers, the model has {self.model.layers}"
            )
        if self.chunks > 1 and self.schedule in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B):
            raise ContractError("chunks", f"must be 1 with the schedule {self.schedule.value}")
        held = {replica.chunks for replica in self.layout.replicas} - {1}
        if held and held != {self.chunks}:
            raise ContractError("chunks", f"is {self.chunks}, but the layout's stages hold {held}")
        if not self.quotas:
            object.__setattr__(self, "quotas", even_quotas(self.microbatches, self.layout.dp))
        if len(self.quotas) != self.layout.dp:
            raise ContractError("quotas", "must have one entry for each replica")
        if Schedule.INTERLEAVED in self.schedules:
            raise ContractError("schedules", "plans cannot be made for interleaved stages")
        if sum(self.quotas) != self.microbatches:
            raise ContractError("quotas", f"must sum to microbatches ({self.microbatches})")

    @property
    def takes_layouts(self) -> bool:
        """True if it can take on another layout, live or by a restart."""
        return Action.LAYOUT in self.actions or Action.RESTART in self.actions


def _schedules(names: Iterable[str]) -> tuple[Schedule, ...]:
    return tuple(map(Schedule.named, names))


def name_of_run(script: str, run: str) -> str:
    """Name of the job of a script in a run of its launcher, whose id is "none" where it has none.

    >>> name_of_run("train", "none"), name_of_run("train", "7/2")
    ('train', 'train-7-2')
    """
    return acceptable_name(script if run == "none" else f"{script}-{run}")


def acceptable_name(name: str) -> str:
    """`name` without what the name of a job may not have: it is a part of URLs."""
    if name in (".", ".."):
        return "-" * len(name)
    return "".join(c if c.isprintable() and c != "/" else "-" for c in name)[:128]


def even_quotas(microbatches: int, replicas: int) -> tuple[int, ...]:
    """`microbatches` spread over `replicas` as evenly as they go, the larger parts first."""
    replicas = checked("replicas", whole_number, replicas, least=1)
    size, extra = divmod(checked("microbatches", whole_number, microbatches, least=0), replicas)
    return tuple(size + (index < extra) for index in range(replicas))
