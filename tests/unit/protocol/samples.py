"""One small message of every type, and what it is in each schema."""

from typing import Any

import msgspec

from protocol.wire import messages as m
from protocol.wire import messages as p

SHA = "0123456789abcdef" * 4
POLICY = m.PolicyInfo(version=3, digest=SHA, num_bytes=70_000)
TURN = m.GpuTurn(number=4, side="trainer", within_s=30.0)
FACTS = m.EngineFacts(
    base_model_digest=SHA,
    tokenizer_digest=SHA,
    dtype="float32",
    logprobs_mode="processed_logprobs",
    max_lora_rank=16,
    max_loras=3,
    max_model_len=512,
    reward_names=["exact"],
    quantization="fp8",
    trainer_quantization="nf4",
)

SAMPLES = [
    m.Hello(
        producer="host-1",
        facts=FACTS,
        capacity=64,
        held=["7.0"],
        release="0.2.0",
        swap_mode="merged",
        evaluates=True,
        run_id="run",
        host="host",
        region="eu",
        bundle=SHA,
        metrics="host:9465",
        gpus=("GPU-1",),
        takes_turns=True,
    ),
    m.Welcome(
        run_id="run",
        session="s1",
        policy=POLICY,
        heartbeat_interval_s=1.0,
        plan=m.RunPlan(max_steps=60, num_epochs=1.5, steps_per_version=2, columns=("answer",)),
    ),
    m.Reject(problems=["another base model: give both the same model.path"]),
    m.Lease(
        lease_id="7.0",
        prompt_id=7,
        attempt=0,
        prompt=[{"role": "user", "content": "1+1="}],
        columns={"answer": 2, "tags": ["sum", None]},
        sampling=m.Sampling(
            num_generations=2,
            max_completion_length=8,
            temperature=0.7,
            stop=("</answer>",),
            stop_token_ids=(5, 6),
            ignore_eos=True,
            regex="[0-9]+",
            json_schema='{"type": "integer"}',
        ),
        policy_floor=2,
        timeout_s=600.0,
        evaluates=POLICY,
    ),
    m.Group(
        lease_id="7.0",
        policy_version=3,
        prompt_ids=b"\x01\x00\x00\x00",
        completion_lengths=b"\x01\x00\x00\x00" * 2,
        completion_ids=b"\x05\x00\x00\x00" * 2,
        logprobs=b"\x00\x00\x80\xbf" * 2,
        rewards=b"\x00\x00\x80?" * 2,
        truncated=b"\x00\x01",
        generation_s=0.5,
        reward_s=0.25,
        token_versions=b"\x03\x00\x00\x00\x04\x00\x00\x00",
        missing=(m.MissingReward("exact", "timeout", "did not return within 5 seconds", (1,)),),
        credit=b"\x00\x00\x00?" + b"\x00" * 4,
        span_ends=b"\x01\x00",
        teacher_logprobs=b"\x00\x00\x00\xbf" + b"\x00" * 4,
        teacher_top_ids=b"\x07\x00\x00\x00" + b"\xff" * 4,
        teacher_top_logprobs=b"\x00\x00\x80\xbf" + b"\x00" * 4,
        logged=m.Logged(metrics={"accuracy": 0.5}, extra={"wanted": ("2", "2")}),
    ),
    m.Ack(lease_id="7.0", outcome="accepted", policy=POLICY),
    m.Nack(lease_id="7.0", reason="reward_failed", detail="exact raised KeyError: 'answer'"),
    m.Policy(policy=POLICY, evaluates=POLICY, turn=TURN),
    m.Heartbeat(
        policy_version=-1,
        capacity=64,
        held=["7.0", "8.0"],
        tokens_generated=123_456,
        busy_s=9.5,
        idle_s=0.5,
        refused_version=2,
        refusal="the probe differs by 0.5",
        relay="tcp://10.0.0.7:5600",
        asleep_in=4,
        num_refused=1,
    ),
    m.Bye(reason="finished"),
    m.BundleRequest(),
    m.BundleOffer(digest=SHA, num_bytes=5_000, chunk_bytes=2**20, blob_endpoint="tcp://*:5600"),
    m.PolicyRequest(digest=SHA),
    m.PolicyOffer(
        digest=SHA,
        shared_file="/dev/shm/v3",
        probe=m.Probe(b"\x05\x00\x00\x00" * 2, 2, *[b"\x00\x00\x80\xbf"] * 4),
        relays=[p.RelayAddress("tcp://10.0.0.7:5600", "k" * 40), p.RelayAddress("tcp://[::1]:5600")],
        anchor=m.PolicyInfo(3, SHA, 1_000),
    ),
    m.BlobRequest(digest=SHA, offset=2**20, length=2**20),
    m.BlobChunk(digest=SHA, offset=2**20, data=bytes(range(32))),
    m.BlobMissing(digest=SHA),
    p.BlobProgress(digest=SHA, num_bytes=2**20),
    m.RelayPeers(peers=[p.RelayPeer("gpu01", "k" * 40)]),
]


def body_of(message: Any) -> dict[str, Any]:
    """Return the message as plain Python, as any msgpack library sees it."""
    body: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return body
