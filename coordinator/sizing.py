"""The sizing calculator: how many lanes fit a host, what share of the experts each caches, how fast a token can be.

A pure function: sizes, a host and rates in, a plan out. What it assumes stands in `ASSUMPTIONS` and in the fields of
`Rates`; nothing is measured here. Not here: where the sizes come from (model_sizes), how a plan is shown (cli.plan).

A decode step of one token:

    cpu    layers * layer_s + (dense + experts) / rate(lane)      rate(lane) = min(cores * core, memory / lanes)
    cuda   layers * layer_s + handshake_s + (dense + hits) / gpu + misses / (share * (link + rate(lane)))

Misses do not get all of link and CPU: a layer's are few and whole, and it waits for the later side.

A pass of a GPU lane over a prompt's chunk of R rows; experts cross beside the products of the layer before:

    layers * prompt_layer_s
        + max(experts outside the cache / link, R * (dense / prompt_dense + experts / prompt_experts))

Invariant: more memory, cores or bandwidth never makes a plan worse; hits are between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.cores import cores_of_a_lane, spare
from coordinator.errors import BadOption
from coordinator.model_sizes import ModelSizes
from coordinator.units import size

GB = 1e9
PROCESS_BYTES = 350 << 20  # a lane's own heap, libraries and page tables: bench/LOG.md, "What the second lane costs"
GPU_FIXED_BYTES = 1808 << 20  # a CUDA context, slices of activations and what nobody uses: lanes/limits.py
HOST_FLOOR_BYTES = 1 << 30  # left to the kernel, the page cache, owner and coordinator
PREFILL_CHUNK_TOKENS = 8192  # where half of the free memory holds the activations of so many
PREFILL_ROWS_IN_PLACE = 1024  # of a chunk; the others' activations lie in the cache's memory: lanes/limits.py
SKEW = 0.22  # hottest 10 % of experts take 60 % of the reads: hits = share ** SKEW
ASSUMPTIONS = (
    "one active conversation per lane; drafts off; context short enough that reading keys does not count",
    "low: every expert is equally likely; high: the hottest tenth of the experts takes 60 % of the reads",
    "CPU lanes keep dense weights in fp32, GPU lanes as the pack has them",
    "a lane of its own takes 350 MiB of process; 1 GiB of RAM stays free",
    "a GPU lane has one conversation in VRAM, others and the embedding in RAM; context and slices: 1.8 GiB",
    "half of what is then free, at most, is a prompt's chunk's of up to 8,192 rows while it is read, else the cache's",
    "beside GPU lanes, of a host of 8 cores one, of 24 two are the doors' (spare)",
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware gives; decimal gigabytes a second, microseconds."""

    core_gb_per_s: float = 4.7  # one core in the expert kernel, of many at work
    memory_gb_per_s: float = 100.0  # all cores of the host together
    link_gb_per_s: float = 50.0  # host memory to one GPU
    gpu_gb_per_s: float = 4000.0  # one GPU's own memory
    cpu_layer_us: float = 700.0  # a layer's fixed work on a CPU lane, whatever its size
    gpu_layer_us: float = 45.0  # a layer beyond its bytes: small kernels, launches; as the next, from decode-h200.json
    gpu_miss_share: float = 0.83  # of link and CPU together, what misses get of them
    handshake_us: float = 350.0  # a step's exchange between GPU and CPU
    # of a prompt: bytes of weights that are applied to rows, once for each row; and a layer's launches and waits
    gpu_prompt_dense_gb_per_s: float = 92_000.0
    gpu_prompt_expert_gb_per_s: float = 19_600.0
    gpu_prompt_layer_us: float = 1700.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            least = 0.0 if name.endswith("_us") else 1e-6
            if not isinstance(value, int | float) or not least <= value <= 1e9:
                raise BadOption(f"rate {name}: {value!r} is not a number from {least:g} to 1e9")


@dataclass(frozen=True, slots=True)
class Host:
    """What there is. On cuda `vram_bytes` is of one GPU and there is one lane per GPU; on cpu it is a lane's cache."""

    device: str
    ram_bytes: int
    vram_bytes: int
    cores: int


@dataclass(frozen=True, slots=True)
class Load:
    """What the lanes are to hold."""

    conversations: int = 4  # kept in a lane's memory beside each other
    tokens: int = 8192  # of each
    hit_rate: float | None = None  # measured or expected; None: estimated between low and high


@dataclass(frozen=True, slots=True)
class Plan:
    """One number of lanes on one host."""

    lanes: int
    cores_per_lane: int
    cores_spare: int  # of the host's, no lane's at least
    ram_bytes: int  # of region and lanes together
    ram_free_bytes: int  # negative: does not fit
    lane_ram_bytes: int  # of one lane, without the region
    dense_bytes: int  # of one lane, where it computes
    state_bytes: int  # of one lane's conversations
    cache_bytes: int  # of one lane's experts
    cache_share: float  # of all experts
    hit_rate: tuple[float, float]  # low, high
    bytes_per_token: dict[str, tuple[float, float]]  # by source, low and high hit rate
    tokens_per_s: tuple[float, float]  # of one lane
    total_tokens_per_s: tuple[float, float]  # of all lanes while all work
    prefill_chunk_tokens: int | None  # None on cpu
    prefill_tokens_per_s: float | None  # of a long prompt; None on cpu
    prefill_s: dict[str, float]  # of one chunk, by part: link and products beside each other, then launches
    reasons: tuple[str, ...]  # why it does not fit; empty when it does

    @property
    def fits(self) -> bool:
        """Whether it can be started."""
        return not self.reasons


def plan(sizes: ModelSizes, host: Host, load: Load, rates: Rates, lanes: int) -> Plan:
    """What `lanes` lanes on this host would be."""
    gpu = host.device == "cuda"
    element = sizes.pack_element_bytes if gpu else 4
    embedding = sizes.embedding_elements * element
    dense = sizes.dense_elements * element - (embedding if gpu else 0)
    one = sizes.conversation_bytes(load.tokens, element)
    state = load.conversations * one
    every_expert = sizes.layers * sizes.experts * sizes.record_bytes
    # States go in and out of VRAM through a staging area as large as their fixed part.
    room = host.vram_bytes - (dense + one + sizes.fixed_state_bytes + GPU_FIXED_BYTES if gpu else 0)
    rows = max(0, min(PREFILL_CHUNK_TOKENS, room // (2 * sizes.chunk_row_bytes))) if gpu else 0
    in_place = min(rows, PREFILL_ROWS_IN_PLACE)
    cache, beside_a_chunk = (
        max(0, min(room - held * sizes.chunk_row_bytes, every_expert) // sizes.record_bytes * sizes.record_bytes)
        for held in (in_place, rows)
    )
    lane_ram = PROCESS_BYTES + (embedding + state - one if gpu else dense + state + cache)
    ram = sizes.region_bytes + lanes * lane_ram
    share = cache / every_expert
    hits = (share, share**SKEW) if load.hit_rate is None else (load.hit_rate, load.hit_rate)
    cores = cores_of_a_lane(host.cores, lanes, gpu=gpu)
    reasons = []
    free = host.ram_bytes - HOST_FLOOR_BYTES - ram
    if free < 0:
        reasons.append(f"RAM: {size(-free)} are missing")
    if gpu and room < 0:
        reasons.append(f"VRAM: {size(-room)} are missing before any expert is cached")
    if cores < 1:
        reasons.append(f"cores: {lanes} lanes on {host.cores}")
    low, high = (_step(sizes, element, rates, gpu, max(1, cores), lanes, hit) for hit in hits)
    speeds = (1.0 / low[0], 1.0 / high[0])
    reading = _prefill(sizes, element, rates, every_expert - beside_a_chunk, rows) if gpu else {}
    return Plan(
        lanes=lanes,
        cores_per_lane=cores,
        cores_spare=spare(host.cores, gpu=gpu),
        ram_bytes=ram,
        ram_free_bytes=free,
        lane_ram_bytes=lane_ram,
        dense_bytes=dense,
        state_bytes=state,
        cache_bytes=cache,
        cache_share=share,
        hit_rate=hits,
        bytes_per_token={name: (low[1][name], high[1][name]) for name in low[1]},
        tokens_per_s=speeds,
        total_tokens_per_s=(lanes * speeds[0], lanes * speeds[1]),
        prefill_chunk_tokens=rows if gpu else None,
        prefill_tokens_per_s=rows / _pass_s(reading) if gpu else None,
        prefill_s=reading,
        reasons=tuple(reasons),
    )


def most_lanes(sizes: ModelSizes, host: Host, load: Load, rates: Rates, limit: int) -> int:
    """The largest number of lanes up to `limit` that fits; 0 when one does not."""
    fitting = 0
    while fitting < limit and plan(sizes, host, load, rates, fitting + 1).fits:
        fitting += 1
    return fitting


def _step(
    sizes: ModelSizes, element: int, rates: Rates, gpu: bool, cores: int, lanes: int, hit: float
) -> tuple[float, dict[str, float]]:
    """Seconds of a token, and its bytes by source."""
    dense = float(sizes.dense_elements_per_token * element)
    experts = float(sizes.expert_bytes_per_token)
    cpu_rate = min(cores * rates.core_gb_per_s, rates.memory_gb_per_s / lanes) * GB
    bytes_by_source = {"dense": dense, "cache": experts * hit, "region": experts * (1 - hit)}
    if not gpu:
        seconds = sizes.layers * rates.cpu_layer_us * 1e-6 + (dense + experts) / cpu_rate
        return seconds, bytes_by_source
    seconds = sizes.layers * rates.gpu_layer_us * 1e-6 + rates.handshake_us * 1e-6
    seconds += (dense + experts * hit) / (rates.gpu_gb_per_s * GB)
    seconds += experts * (1 - hit) / (rates.gpu_miss_share * (rates.link_gb_per_s * GB + cpu_rate))
    return seconds, bytes_by_source


def _prefill(sizes: ModelSizes, element: int, rates: Rates, missing_bytes: int, rows: int) -> dict[str, float]:
    """Seconds of a chunk by part."""
    row_s = sizes.dense_elements_per_token * element / (rates.gpu_prompt_dense_gb_per_s * GB)
    row_s += sizes.expert_bytes_per_token / (rates.gpu_prompt_expert_gb_per_s * GB)
    return {
        "link": missing_bytes / (rates.link_gb_per_s * GB),
        "products": rows * row_s,
        "launches": sizes.layers * rates.gpu_prompt_layer_us * 1e-6,
    }


def _pass_s(parts: Mapping[str, float]) -> float:
    return parts["launches"] + max(parts["link"], parts["products"])
