"""Messages of the wire, as typed msgspec structs.

Guarantee: a decoded message has every field, of the declared type and within the declared size; `protocol.wire.codec.decode`
refuses everything else. Token ids, log-probs and rewards travel as raw little-endian buffers inside the msgpack map, so any
msgpack library can read a frame and no list of numbers is ever boxed.

A producer sends `ProducerMessage` and accepts `TrainerMessage`; for a trainer it is the other way round. To a relay, which is a
producer that hands policies on, a producer sends `RelayRequest` and accepts `RelayMessage`. A Nack tells that a lease cannot be
done, or that a group is refused.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=2**53)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Version = Annotated[int, Meta(ge=0, le=2**31)]
MAX_RELAYS = 8  # that are named for one policy

RelayEndpoint = Annotated[str, Meta(max_length=256, pattern=r"^(tcp://[A-Za-z0-9.:_\[\]-]+:[0-9]{1,5})?\Z")]
CurveKey = Annotated[str, Meta(pattern=r"^[!-~]{40}\Z")]  # public, in Z85

LOGGED_CHARS, MOST_METRICS, MOST_COLUMNS = 200, 32, 8
"""Bounds of what reward functions log of a group: of a text, and of the names of numbers and of columns."""
NAME_CHARS = 64
_LoggedName = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
_LoggedTexts = Annotated[tuple[Annotated[str, Meta(max_length=LOGGED_CHARS)], ...], Meta(max_length=4096)]

LARGEST_POLICY_BYTES = 2**40
"""No adapter is nearly as large. A producer that takes one also looks at its memory."""


class PolicyInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """A published policy. `digest` names the adapter blob: it is the sha256 of its `num_bytes` bytes."""

    version: Version
    digest: Sha256
    num_bytes: Annotated[int, Meta(ge=0, le=LARGEST_POLICY_BYTES)]


class PolicyRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="policy_request"):
    """Asks how to fetch and verify the policy of this digest. The answer is its offer, or `BlobMissing`."""

    digest: Sha256


class RelayAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """A producer that hands policies on, and the public key that it has (None: there are no keys)."""

    endpoint: RelayEndpoint
    key: CurveKey | None = None


_ProbePart = Annotated[bytes, Meta(max_length=2**16)]


class Probe(Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens, and the trainer's log-probs of them at temperature 1, which prove a swap. `token_ids`, int32 (R, L), are R rows of
    `row_length` L. The others are float32 (R, L - 1), of each token but the first of its row: of the `base`, and of the `policy`
    (empty: this version is not measured). `exact_base` and `exact` are the same in float32 arithmetic, or empty."""

    token_ids: _ProbePart
    row_length: Annotated[int, Meta(ge=2, le=2**14)]
    base: _ProbePart
    exact_base: _ProbePart = b""
    policy: _ProbePart = b""
    exact: _ProbePart = b""


class PolicyOffer(Struct, frozen=True, forbid_unknown_fields=True, tag="policy_offer"):
    """`shared_file` holds the blob for producers of the same host ("": there is none). The `probe` proves the swap. `relays` hand
    the blob on and are asked before the trainer, in this order; a relay's own offer says only that it has the blob. `anchor` is
    the blob on which a patch of weights builds (None: it builds on the checkpoint), with the version of the patch."""

    digest: Sha256
    shared_file: Annotated[str, Meta(max_length=4096)] = ""
    probe: Probe | None = None
    relays: Annotated[list[RelayAddress], Meta(max_length=MAX_RELAYS)] = []
    anchor: PolicyInfo | None = None


class BlobRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_request"):
    digest: Sha256
    offset: Count
    length: Annotated[int, Meta(ge=1, le=2**26)]


class BlobChunk(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_chunk"):
    digest: Sha256
    offset: Count
    data: bytes


class BlobMissing(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_missing"):
    """The trainer no longer keeps this blob; the producer asks for the newest policy instead."""

    digest: Sha256


class BlobProgress(Struct, frozen=True, forbid_unknown_fields=True, tag="blob_progress"):
    """A relay's answer while it does not have the blob: `num_bytes` of it have arrived there so far."""

    digest: Sha256
    num_bytes: Count


class RelayPeer(Struct, frozen=True, forbid_unknown_fields=True):
    """The owner of a public key."""

    identity: Annotated[str, Meta(min_length=1, max_length=64)]
    key: CurveKey


class RelayPeers(Struct, frozen=True, forbid_unknown_fields=True, tag="relay_peers"):
    """Tells a relay who may connect to it, in place of those named before."""

    peers: Annotated[list[RelayPeer], Meta(max_length=65_536)]


RelayMessage = PolicyOffer | BlobProgress | BlobChunk | BlobMissing
RelayRequest = PolicyRequest | BlobRequest

BLOB_MESSAGES = (PolicyRequest, PolicyOffer, BlobRequest, BlobProgress, BlobChunk, BlobMissing)
"""Messages that travel on their own socket, so that a large adapter never delays a lease or an acknowledgement."""


class GpuTurn(Struct, frozen=True, forbid_unknown_fields=True):
    """The turn on the GPU that the trainer shares with producers (`pipeline.gpu: turns`). Every hand-over raises `number` by
    one. In the trainer's turn producers put their engine to sleep; what still runs after `within_s` is cut."""

    number: Count
    side: Literal["trainer", "producers"]
    within_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0


Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=65_536)]
Place = Annotated[str, Meta(max_length=128)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
LeaseIds = Annotated[list[Name], Meta(max_length=65_536)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class EngineFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of an engine, compared with the trainer's needs before any work starts (see `protocol.wire.handshake`).
    `quantization` is the format of its base weights, `trainer_quantization` what its configuration says of the trainer's ("":
    none)."""

    base_model_digest: Sha256
    tokenizer_digest: Sha256
    dtype: Name
    logprobs_mode: Name
    max_lora_rank: Count
    max_loras: Count
    max_model_len: Count
    reward_names: Annotated[list[Name], Meta(max_length=256)]
    quantization: Annotated[str, Meta(max_length=128)] = ""
    trainer_quantization: Annotated[str, Meta(max_length=128)] = ""


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters by which the completions of a group are drawn. The trainer decides it, so that all producers sample
    alike. Only an evaluation may ask for a single completion, or for temperature 0, which is greedy and whose log-probs mean
    nothing. A completion ends with one of the texts `stop`, one of the tokens `stop_token_ids`, and the model's own end unless
    `ignore_eos`. Only what matches `regex`, or JSON of `json_schema`, may be sampled ("": anything)."""

    num_generations: Annotated[int, Meta(ge=1, le=4096)]
    max_completion_length: Annotated[int, Meta(ge=1, le=2**24)]
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False
    regex: Text = ""
    json_schema: Text = ""


class Hello(Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Opens a session. `held` names the leases that the producer works on or holds results for, and `run_id` the run that gave
    them ("" if unknown, or none did). `release` is its version of Slipstream ("" if unknown), `swap_mode` how it takes new
    policies (`swap.mode`), and `evaluates` whether it may be given leases of an evaluation. `host` and `region` say where it
    runs; producers of one region reach each other fast ("": unknown). `metrics` is where others reach its metrics, HOST:PORT
    ("": nowhere). `gpus` are the ids of its engine's, which it leaves to the trainer if it `takes_turns`."""

    producer: Name
    facts: EngineFacts
    capacity: Count
    held: LeaseIds = []
    release: Annotated[str, Meta(max_length=128)] = ""
    swap_mode: Literal["adapter", "merged", "full"] = "adapter"
    evaluates: bool = False
    run_id: Annotated[str, Meta(max_length=128)] = ""
    host: Place = ""
    region: Place = ""
    bundle: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    metrics: Annotated[str, Meta(max_length=262, pattern=r"^([0-9A-Za-z.:_\[\]-]+:[0-9]{1,5})?\Z")] = ""
    gpus: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    takes_turns: bool = False


class RunPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The course of a run, for reward functions. `max_steps` and `num_epochs` are its length, each version is that of
    `steps_per_version` steps, and `columns` are those that any row has beside its prompt (None: unknown)."""

    max_steps: Count = 0
    num_epochs: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    steps_per_version: Annotated[int, Meta(ge=1, le=2**31)] = 1
    columns: Annotated[tuple[Text, ...], Meta(max_length=65_536)] | None = None


class Welcome(Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    run_id: Name
    session: Name
    policy: PolicyInfo
    heartbeat_interval_s: Seconds
    plan: RunPlan = RunPlan()


class Reject(Struct, frozen=True, forbid_unknown_fields=True, tag="reject"):
    """The handshake refused. Every problem is a sentence with its fix."""

    problems: Annotated[list[Text], Meta(max_length=64)]


class BundleRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="bundle_request"):
    """Asks for the configuration and the code of the run (`slipstream_extras.bundle`). The answer is an offer, or `Reject`."""


class BundleOffer(Struct, frozen=True, forbid_unknown_fields=True, tag="bundle_offer"):
    """`digest` is the sha256 of the bundle, a blob of `num_bytes` that the trainer sends in chunks of at most `chunk_bytes`.
    `blob_endpoint` is the trainer's, where the address of the control channel does not tell it ("": it does)."""

    digest: Sha256
    num_bytes: Count
    chunk_bytes: Annotated[int, Meta(ge=1, le=2**26)]
    blob_endpoint: Annotated[str, Meta(max_length=4096)] = ""


class Lease(Struct, frozen=True, forbid_unknown_fields=True, tag="lease"):
    """The right and duty to answer one prompt with one group, generated by `policy_floor` or a newer version. A lease of an
    evaluation `evaluates` a policy: that policy alone may answer, and leases for training are given first."""

    lease_id: Name
    prompt_id: Count
    attempt: Count
    prompt: Any  # str, or a list of chat messages
    columns: dict[str, Any]
    sampling: Sampling
    policy_floor: Version
    timeout_s: Seconds
    evaluates: PolicyInfo | None = None


class MissingReward(Struct, frozen=True, forbid_unknown_fields=True):
    """The reason why rewards are missing: the failure of `function` ("": the episode itself), for these completions of the
    group (empty: all of them)."""

    function: Annotated[str, Meta(max_length=128)]
    reason: Annotated[str, Meta(max_length=32)]
    problem: Annotated[str, Meta(max_length=500)]
    completions: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()


class Logged(Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that reward functions logged of a group, and a text of each completion by column."""

    metrics: Annotated[dict[_LoggedName, float], Meta(max_length=MOST_METRICS)] = {}
    extra: Annotated[dict[_LoggedName, _LoggedTexts], Meta(max_length=MOST_COLUMNS)] = {}


class Group(Struct, frozen=True, forbid_unknown_fields=True, tag="group"):
    """Completions of one prompt (a rollout group), scored.  With n completions, T sampled tokens in all and F reward functions:
    `prompt_ids` int32 (P,), `completion_lengths` int32 (n,), `completion_ids` int32 (T,), `logprobs` float32 (T,)
    under the processed sampling distribution, `rewards` float32 (n, F) with NaN for missing, `truncated` uint8 (n,).
    `token_versions` int32 (T,) has the policy version that sampled each token, where they differ; `policy_version` is the
    oldest of them.  With an environment a completion is an episode of several turns, and T counts the tokens of tool results
    too. `sampled` uint8 (T,) is 1 for those that the policy sampled (empty: all); the others have log-prob 0. An episode
    whose history the chat template rewrote takes several of R records, each a sequence of its own: `completion_lengths` and
    `truncated` then have R entries, and `episodes` int32 (R,) says which of the n episodes each belongs to, in order (empty:
    one record each). `prompt_ids` is what all records begin with.  `missing` says of rewards that are missing why, as far as
    that is known; it is for people.  `span_ends` uint8 (T,) is 1 for the last sampled token of every span that has a reward of
    its own, and `credit` float32 (T,) has that reward there, times its weight, and 0 elsewhere (both empty: no span has one).
    `teacher_logprobs` float32 (T,) is a teacher's log-prob of each sampled token, and 0 of the others (empty: none was asked).
    `teacher_top_ids` int32 (T, k) has the k tokens that the teacher found likeliest in the place of each sampled token, and -1
    for those that the policy does not have and in rows of other tokens; `teacher_top_logprobs` float32 (T, k) has their
    log-probs, and 0 beside -1 (both empty: k is 0).  `logged` has n texts in each column."""

    lease_id: Name
    policy_version: Version
    prompt_ids: bytes
    completion_lengths: bytes
    completion_ids: bytes
    logprobs: bytes
    rewards: bytes
    truncated: bytes
    generation_s: Seconds
    reward_s: Seconds
    token_versions: bytes = b""
    sampled: bytes = b""
    episodes: bytes = b""
    missing: Annotated[tuple[MissingReward, ...], Meta(max_length=16)] = ()
    credit: bytes = b""
    span_ends: bytes = b""
    teacher_logprobs: bytes = b""
    teacher_top_ids: bytes = b""
    teacher_top_logprobs: bytes = b""
    logged: Logged = Logged()


class Ack(Struct, frozen=True, forbid_unknown_fields=True, tag="ack"):
    """The producer may forget the group. The policy is included, so that a lost announcement does no harm."""

    lease_id: Name
    outcome: Literal["accepted", "no_signal", "stale", "duplicate"]
    policy: PolicyInfo


FailureReason = Literal[
    "prompt_too_long",
    "bad_prompt",
    "reward_failed",
    "environment_failed",
    "generation_failed",
    "no_policy",
    "returned",
]


class Nack(Struct, frozen=True, forbid_unknown_fields=True, tag="nack"):
    """A lease that its producer cannot fulfil, or a group that the trainer refuses (`invalid`, `unknown_lease`)."""

    lease_id: Name
    reason: FailureReason | Literal["invalid", "unknown_lease"]
    detail: Text = ""


class Policy(Struct, frozen=True, forbid_unknown_fields=True, tag="policy"):
    """Announces the newest policy, the policy that is evaluated now or next, and whose `turn` it is on the GPU that this producer
    shares with the trainer (None: on none, or always its own). It is also the trainer's answer to a heartbeat."""

    policy: PolicyInfo
    evaluates: PolicyInfo | None = None
    turn: GpuTurn | None = None


class Heartbeat(Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """The state of a producer, sent once per interval. Counters are totals since the producer started; `waiting`, `generating`,
    `scoring` and `unacked` say where the held leases are now; `refused_version` is the newest policy that this producer
    does not serve because of what `refusal` says; `relay` is the endpoint at which it hands policies on ("": it does not);
    `asleep_in` is the number of the trainer's turn in which its engine sleeps (-1: it does not); `num_refused` counts the
    versions in a row, up to `refused_version`, that it will never serve (0: it tries that one again, or refuses none)."""

    policy_version: Annotated[int, Meta(ge=-1, le=2**31)]  # -1 while no policy is loaded
    capacity: Count
    held: LeaseIds
    tokens_generated: Count
    busy_s: Seconds
    waiting: Count = 0  # for a policy, or for room in the engine
    generating: Count = 0
    scoring: Count = 0
    unacked: Count = 0
    idle_s: Seconds = 0.0  # connected without a request in the engine
    refused_version: Annotated[int, Meta(ge=-1, le=2**31)] = -1  # -1: none
    refusal: Text = ""
    relay: RelayEndpoint = ""
    asleep_in: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    num_refused: Count = 0


class Bye(Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """Ends a session. `unknown_session` answers a peer that never said hello to *this* trainer process."""

    reason: Literal["finished", "stopping", "unknown_session"]


ProducerMessage = Hello | Group | Nack | Heartbeat | Bye | BundleRequest | PolicyRequest | BlobRequest
TrainerMessage = (
    Welcome | Reject | Lease | Ack | Nack | Policy | Bye | BundleOffer | PolicyOffer | BlobChunk | BlobMissing | RelayPeers
)  # fmt: skip
Message = ProducerMessage | TrainerMessage | RelayMessage


def is_conversational(prompt: Any) -> bool:
    """Return whether it is a list of messages, each with a role and a content, and not empty."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def media_in(prompt: Any) -> str | None:
    """The kind of the first part of a message that is not text, as chat templates name it; None if there is none."""
    parts = (
        part for message in (prompt if is_conversational(prompt) else ()) if isinstance(message["content"], list)
        for part in message["content"] if isinstance(part, dict)
    )  # fmt: skip
    return next((str(kind) for part in parts if (kind := part.get("type", "text")) != "text"), None)


def prompt_token_ids(tokenizer: Any, prompt: Any, chat_template_kwargs: dict[str, Any]) -> list[int]:
    """The token ids as in TRL's GRPOTrainer: strings get the tokenizer's special tokens, and messages go through the chat
    template with a generation prompt. It may raise whatever a chat template raises, which is a program of the model's
    author."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    rendered = tokenizer.apply_chat_template(
        conversation=[prompt], add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(rendered["input_ids"][0])


def unknown_token(tokenizer: Any, ids: Iterable[int], vocab_size: int) -> str:
    """Return which of these tokens the model does not have, with the fix; "" if it has all."""
    largest = max(ids, default=0)
    if largest < vocab_size:
        return ""
    return (
        f"has token {largest} ({tokenizer.decode([largest])!r}): the tokenizer knows {len(tokenizer)} tokens, and the model has "
        f"embeddings of {vocab_size}. Enlarge these in model.path (`resize_token_embeddings` of transformers) or take the token "
        "out of the row"
    )
