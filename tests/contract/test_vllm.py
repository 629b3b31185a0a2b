"""vLLM: every name, signature and attribute of it that producer/engine takes for granted, and what it reads of our objects.

The sources are read and not imported: those that are installed, or those in the folder that SLIPSTREAM_VLLM_SOURCES names.
`python -m tests.contract.releases` does so with the wheels of every release in the declared range.
"""

import ast
import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.sources import Sources, arguments_of, attribute, attributes_of, call_of, defined, parsed

REPOSITORY = Path(__file__).parents[2]
OURS = [
    *sorted((REPOSITORY / "producer/engine").glob("*.py")),
    REPOSITORY / "slipstream_extras/endpoint/openai_server.py",
]

LLM = "vllm.v1.engine.async_llm:AsyncLLM"
WORKERS = ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.cpu_worker:CPUWorker")
MANAGER = "vllm.lora.worker_manager:WorkerLoRAManager"
PUNICA = "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU"
CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
COMPLETION = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
LINEAR = "vllm.model_executor.layers.linear"
CONFIG = "vllm.config"

CALLS = (
    f"{LLM}.add_request(self, request_id, prompt, params, lora_request=lora)",
    f"{LLM}.generate(self, prompt, params, request_id, lora_request=lora)",
    f"{LLM}.abort(self, request_id, internal=True)",
    f"{LLM}.get_num_unfinished_requests(self)",
    f"{LLM}.collective_rpc(self, method, args=args)",
    f"{LLM}.sleep(self, 1)",
    f"{LLM}.wake_up(self)",
    f"{LLM}.shutdown(self)",
    "vllm.v1.engine.output_processor:RequestOutputCollector.get(self)",
    f"{CHAT}.create_chat_completion(self, request)",
    f"{CHAT}.create_error_response(self, error)",
    f"{COMPLETION}.create_completion(self, request)",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__(self, engine_client=c, base_model_paths=[])",
    "vllm.tool_parsers.abstract_tool_parser:ToolParserManager.get_tool_parser(self, name)",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.__init__(self, tokenizer, tools)",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.adjust_request(self, request)",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser.extract_tool_calls(self, text, request)",
    f"{MANAGER}._load_adapter(self, request)",
    "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper(self)",
    "vllm.model_executor.models.utils:WeightsMapper.apply_list(self, names)",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight=False)",
    f"{LINEAR}:UnquantizedLinearMethod.process_weights_after_loading(self, layer)",
    f"{LINEAR}:UnquantizedLinearMethod.apply(self, layer, x, None)",
    f"{LINEAR}:QKVParallelLinear.weight_loader(self, param, loaded, shard)",
    f"{LINEAR}:MergedColumnParallelLinear.weight_loader(self, param, loaded, shard)",
    f"{LINEAR}:ColumnParallelLinear.weight_loader(self, param, loaded)",
    f"{LINEAR}:RowParallelLinear.weight_loader(self, param, loaded)",
    f"{LINEAR}:ReplicatedLinear.weight_loader(self, param, loaded)",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.weight_loader(self, param, loaded)",
    *(f"{worker}.add_lora(self, request)" for worker in WORKERS),
    *(f"{worker}.remove_lora(self, number)" for worker in WORKERS),
    *(f"{worker}.get_model(self)" for worker in WORKERS),
    *(f"{worker}.execute_model(self, step)" for worker in WORKERS),
    "vllm.platforms.interface:Platform.is_sleep_mode_available(cls)",
)
"""What we call on objects that vLLM made. Calls of what we import are found in our code."""

CLASSES = {"vllm.platforms:current_platform": "vllm.platforms.interface:Platform"}
"""Of what we import that is no class or function itself."""

ATTRIBUTES = {
    LLM: "errored model_config renderer",
    "vllm.v1.engine.output_processor:RequestOutputCollector": "request_id",
    "vllm.outputs:RequestOutput": "outputs prompt_token_ids prompt_logprobs lora_request num_cached_tokens",
    "vllm.outputs:CompletionOutput": "index token_ids logprobs finish_reason",
    "vllm.logprobs:FlatLogprobs": "start_indices logprobs",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage num_running_reqs num_waiting_reqs cudagraph_stats",
    "vllm.v1.metrics.stats:IterationStats": "num_preempted_reqs num_generation_tokens prompt_token_stats "
    "time_to_first_tokens_iter inter_token_latencies_iter",
    "vllm.v1.metrics.stats:PromptTokenStats": "computed",
    "vllm.compilation.cuda_graph:CUDAGraphStat": "num_unpadded_tokens runtime_mode",
    "vllm.engine.arg_utils:EngineArgs": "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size "
    "cudagraph_metrics max_num_batched_tokens performance_mode",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "finished_req_ids",
    "vllm.v1.core.sched.output:NewRequestData": "req_id prompt_token_ids num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids num_computed_tokens num_output_tokens",
    **dict.fromkeys(WORKERS, "model_runner model_config"),
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": "lora_manager add_lora",
    MANAGER: "_adapter_manager device",
    "vllm.lora.model_manager:LoRAModelManager": "model punica_wrapper_mapping modules packed_modules lora_index_to_id",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": "base_layer tp_rank lora_a_stacked lora_b_stacked",
    "vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA": "output_sizes",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA": "w13_lora_a_stacked",
    PUNICA: "token_lora_indices sampler_indices update_metadata",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU": "_token_lora_indices _sampler_indices _sampler_indices_padded "
    "_embeddings_indices indices_len device is_prefill update_metadata token_mapping_meta prompt_mapping_meta",
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta": "token_lora_mapping token_indices_sorted_by_lora_ids "
    "active_lora_ids num_tokens_per_lora lora_token_start_loc no_lora_flag_cpu num_active_loras_cpu captured_lora_counts",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "lora_state",
    "vllm.v1.worker.gpu.lora_utils:LoraState": "lora_ids lora_requests make_lora_inputs",
    CHAT: "default_sampling_params",
    COMPLETION: "default_sampling_params",
    f"{LINEAR}:LinearBase": "input_size quant_method",
    f"{LINEAR}:ColumnParallelLinear": "input_size_per_partition",
    f"{LINEAR}:QKVParallelLinear": "total_num_kv_heads",
    f"{CONFIG}.vllm:VllmConfig": "load_config speculative_config lora_config model_config scheduler_config "
    "parallel_config quant_config compilation_config",
    f"{CONFIG}.compilation:CompilationConfig": "cudagraph_mode cudagraph_capture_sizes max_cudagraph_capture_size",
    f"{CONFIG}.model:ModelConfig": "dtype logprobs_mode max_model_len enable_sleep_mode enforce_eager "
    "is_moe use_mla model",
    f"{CONFIG}.lora:LoRAConfig": "max_lora_rank max_loras",
    f"{CONFIG}.scheduler:SchedulerConfig": "max_num_seqs max_num_batched_tokens enable_chunked_prefill",
    f"{CONFIG}.parallel:ParallelConfig": "distributed_executor_backend pipeline_parallel_size worker_extension_cls",
    f"{CONFIG}.load:LoadConfig": "load_format",
    f"{CONFIG}.speculative:SpeculativeConfig": "rejection_sample_method",
    "vllm.tool_parsers.abstract_tool_parser:ToolParserManager": "tool_parsers lazy_parsers",
}
"""What we read of objects that vLLM made, or replace in them."""

TEXTS = {
    f"{CONFIG}.model:LogprobsMode": ("'processed_logprobs'",),
    "vllm.v1.engine:FINISH_REASON_STRINGS": ("'stop'", "'length'", "'abort'", "'error'"),
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker": ("worker_class.__bases__", "worker_class(**kwargs)"),
    f"{LINEAR}:UnquantizedLinearMethod.process_weights_after_loading": (
        "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm",
        "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)",
    ),
    f"{CONFIG}.compilation:CUDAGraphMode.__str__": ("return self.name",),
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates": ("rounded_num_reqs > self.max_num_reqs",),
    "vllm.lora.lora_weights:LoRALayerWeights.optimize": ("self.lora_b *= self.scaling",),
}
"""Values, and places where vLLM does what we count on."""

REPLACED = {
    "vllm.lora.punica_wrapper.utils:convert_mapping": "b662ec8402b9",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata": "46b720957f9b",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata": "fdd4f625eb5b",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata": "32cff1eeac25",
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta._reset": "fbc53501aa8b",
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.prepare_tensors": "18c0cb37aef6",
    "vllm.lora.layers.utils:LoRAMapping": "6e406d8b7713",
    "vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping": "b53f96436fbf",
    "vllm.lora.model_manager:LoRAModelManager._set_adapter_mapping": "4d0cdabbd5c3",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras": "fc383cce41cb",
    "vllm.v1.worker.gpu.lora_utils:LoraState.add_request": "864caf357ce1",
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs": "0653865f5feb",
    "vllm.v1.worker.gpu.lora_utils:LoraState.get_activate_loras": "1a5a7cfec891",
}
"""Functions whose results `producer.engine.lora_metadata` computes, and those between: a digest of their code. Where one has
changed, see whether `tests/integration/test_lora_metadata.py` still compares all that it computes."""


@pytest.fixture(scope="module")
def vllm() -> Sources:
    if folder := os.environ.get("SLIPSTREAM_VLLM_SOURCES"):
        return Sources(Path(folder))
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(Path(spec.origin).parents[1])


@functools.cache
def imported() -> dict[Path, dict[str, str]]:
    """By module of ours, what it imports from vLLM: the name there, by the name here."""
    return {
        file: {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(parsed(file))
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for alias in node.names
        }
        for file in OURS
    }


def nodes_with(kind: type[ast.AST]) -> Iterator[tuple[dict[str, str], ast.AST]]:
    for file, names in imported().items():
        for node in ast.walk(parsed(file)):
            if isinstance(node, kind):
                yield names, node


def test_every_name_that_we_import_is_there(vllm: Sources) -> None:
    names = {name for found in imported().values() for name in found.values()}
    assert len(names) > 15
    for name in names:
        vllm.find(name)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.rpartition(":")[2].partition("(")[0])
def test_what_we_call_takes_our_arguments(vllm: Sources, call: str) -> None:
    where, _, text = call.rpartition(":")
    name, given, named = call_of(text)
    vllm.signature(f"{where}:{name}").bind(*given, **named)


def test_what_we_import_and_call_takes_our_arguments(vllm: Sources) -> None:
    checked = set()
    for names, call in nodes_with(ast.Call):
        assert isinstance(call, ast.Call)
        first, _, rest = (attribute(call.func) or "").partition(".")
        if first not in names:
            continue
        module, definition = vllm.find(CLASSES.get(names[first], names[first]))
        if isinstance(definition, ast.ClassDef) and is_model(vllm, module, definition):
            continue  # pydantic has its methods, and checks what it is given
        name = ".".join(filter(None, [CLASSES.get(names[first], names[first]), rest]))
        given, named = arguments_of(call)
        signature = vllm.signature(name)
        bound = [None] * (next(iter(signature.parameters), "") in ("self", "cls"))
        signature.bind_partial(*bound, *given, **named)
        checked.add(name.rpartition(":")[2])
    assert checked >= {"AsyncLLM.from_vllm_config", "SamplingParams", "LoRARequest", "AnthropicServingMessages"}


def is_model(vllm: Sources, module: str, definition: ast.ClassDef) -> bool:
    return any(
        isinstance(base, ast.Name) and base.id == "BaseModel"
        for _, owner in vllm.with_bases(module, definition)
        for base in owner.bases
    )


@pytest.mark.parametrize("name", ATTRIBUTES, ids=lambda name: name.rpartition(":")[2])
def test_what_we_read_of_vllms_objects_is_there(vllm: Sources, name: str) -> None:
    module, definition = vllm.find(name)
    assert isinstance(definition, ast.ClassDef)
    for read in ATTRIBUTES[name].split():
        vllm.member(module, definition, read)


@pytest.mark.parametrize("name", TEXTS, ids=lambda name: name.rpartition(":")[2])
def test_values_that_we_rely_on(vllm: Sources, name: str) -> None:
    text = ast.unparse(vllm.find(name)[1])
    assert [value for value in TEXTS[name] if value not in text] == []


@pytest.mark.parametrize("name", REPLACED, ids=lambda name: name.rpartition(":")[2])
def test_code_that_we_compute_in_another_way_is_what_it_was(vllm: Sources, name: str) -> None:
    code = vllm.find(name)[1]
    assert isinstance(code, ast.FunctionDef | ast.ClassDef)
    without_docstring = code.body[ast.get_docstring(code) is not None :]
    text = "\n".join(map(ast.unparse, without_docstring))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == REPLACED[name]


def test_our_subclasses_override_what_is_there_and_take_what_it_takes(vllm: Sources) -> None:
    overridden = set()
    for names, ours in nodes_with(ast.ClassDef):
        assert isinstance(ours, ast.ClassDef)
        for base in ours.bases:
            if not (isinstance(base, ast.Name) and base.id in names):
                continue
            module, theirs = vllm.find(names[base.id])
            assert isinstance(theirs, ast.ClassDef)
            for member in ours.body:
                for name in names_of(member):
                    _, original = vllm.member(module, theirs, name)
                    overridden.add(name)
                    if isinstance(member, ast.FunctionDef) and isinstance(original, ast.FunctionDef):
                        check_override(member, original)
    assert overridden >= {"record", "log_engine_initialized", "lora_requests", "is_base_model", "gauge_lora_info"}


def names_of(member: ast.AST) -> list[str]:
    if isinstance(member, ast.FunctionDef):
        return [member.name] if not member.name.startswith("__") else []
    return [target.id for target in getattr(member, "targets", ()) if isinstance(target, ast.Name)]


def check_override(ours: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    signature = Sources.of_function(ours)
    keywords = {each.arg: None for each in theirs.args.kwonlyargs}
    signature.bind(*[None] * len(theirs.args.args), **keywords)


def test_what_we_put_in_place_of_the_lora_kernels_takes_what_they_take(vllm: Sources) -> None:
    ours = defined(parsed(REPOSITORY / "producer/engine/adapter_worker.py"), "CpuLora")
    assert ours is not None
    for name, theirs in {
        "shrink": "_apply_shrink",
        "expand": "_apply_expand",
        "add_to_logits": "add_lora_logits",
    }.items():
        function, original = defined(ours, name), vllm.find(f"{PUNICA}.{theirs}")[1]
        assert isinstance(function, ast.FunctionDef)
        assert isinstance(original, ast.FunctionDef)
        assert [each.arg for each in function.args.args] == [each.arg for each in original.args.args]
        check_override(function, original)


def test_what_the_loader_reads_of_a_request_is_there(vllm: Sources) -> None:
    """Signatures alone would not show it: releases before 0.32 read a field more."""
    read = attributes_of(vllm.find(f"{MANAGER}._load_adapter")[1], "lora_request")
    read |= attributes_of(
        vllm.find("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter")[1], "lora_request"
    )
    assert {"lora_path", "lora_int_id"} <= read
    module = parsed(REPOSITORY / "producer/engine/adapter_worker.py")
    handed = defined(module, "Reading") or vllm.find("vllm.lora.request:LoRARequest")[1]
    assert [name for name in sorted(read) if defined(handed, name) is None] == []


def test_what_the_loaders_of_layers_read_of_a_weight_is_there(vllm: Sources) -> None:
    """`producer.engine.published.loaded` gives them a bare parameter."""
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    known = {
        *dir(weight),
        "output_dim",
        "input_dim",
        "packed_factor",
    }  # that last one of weights that are packed as integers
    for name in ("QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear"):
        assert attributes_of(vllm.find(f"{LINEAR}:{name}.weight_loader")[1], "param") <= known, name


def test_what_packs_a_weight_reads_of_a_layer_is_there(vllm: Sources) -> None:
    """`producer.engine.packed_layers.packed` gives it a module with a weight and a bias."""
    read = attributes_of(vllm.find("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm")[1], "layer")
    assert {"weight", "cpu_linear"} & read
    assert read <= {"weight", "bias", "cpu_linear", "register_parameter", "_cpu_unpacked_conv_weight"}
