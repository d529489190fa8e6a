"""The flags of others that one of our fields does the work of."""

from __future__ import annotations

from sapwood.srt.flags.entry import ANY, FALSE, TRUE, Entry, Vocabulary, same

_NOT_PICKLE = "pickled weights are never loaded: convert them to safetensors"
_NOT_STORED = "K and V are stored as float32, float16, bfloat16 or fp8_e4m3, the 8-bit type that there is"
_ONE_KERNEL = "on a GPU attention is FlashInfer's"
_WHOLE_STEPS = "a decode step is captured as a whole, or not at all"
_NO_DEVICE = "the model runs on NVIDIA GPUs (which: CUDA_VISIBLE_DEVICES) or on the CPU"
_OTHER_BACKEND = "that attention backend is not for this runtime"
_ATTENTION = {"torch_native": "reference", "cpu_attn": "cpu"}
_OTHER_ATTENTION = {
    **dict.fromkeys(
        ("triton", "fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "flash_attn",
         "triton_attn", "flex_attention", "xformers", "flashinfer_mla"),
        _ONE_KERNEL,
    ),
    **dict.fromkeys(
        ("torch_sdpa", "intel_amx", "ascend", "aiter", "wave", "intel_xpu", "rocm_flash"), _OTHER_BACKEND
    ),
}  # fmt: skip
_QUANTIZATION = {name: name for name in ("none", "gguf", "w8", "w4", "fp8")}
_OTHER_QUANTIZATION = (
    "what is computed on is a GGUF's own types, or floats rounded at load: none, gguf, w8, w4 or fp8"
)
_TOOL_CALLS = {
    **{name: name for name in ("auto", "none", "hermes", "llama3_json", "mistral", "pythonic")},
    "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic",
    "llama4_json": "llama3_json",
}  # fmt: skip
_OTHER_CALLS = (
    "calls are read in these forms: hermes (qwen, qwen25), llama3_json (llama3, llama4_json), mistral, "
    "pythonic (llama4_pythonic), or auto and none"
)
_REASONING = {
    **{name: name for name in ("auto", "none", "think")},
    **dict.fromkeys(
        ("deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "qwen3", "qwen3-thinking", "glm45",
         "kimi_k2"),
        "think",
    ),
}  # fmt: skip
_OTHER_REASONING = (
    "reasoning is read between <think> and </think> (think, deepseek_r1, qwen3, ...), or auto and none"
)
_DRAFTS = {name: name for name in ("auto", "none", "ngram", "radix")}
_OTHER_DRAFTS = (
    "drafts come from a grammar, the prefix cache and the request's own text, not from a second model: auto, "
    "none, ngram or radix"
)
_INVERSE: dict[str, bool | None] = {TRUE: False, FALSE: True}

_PLAIN: tuple[tuple[str, Vocabulary], ...] = (
    ("model_path skip_tokenizer_init host port api_key chat_template stream_interval", "both"),
    (
        "context_length admin_api_key max_running_requests max_queued_requests max_total_tokens "
        "mem_fraction_static chunked_prefill_size disable_radix_cache disable_overlap_schedule "
        "random_seed log_level log_requests schedule_low_priority_values_first schedule_conservativeness",
        "sglang",
    ),
)
_LISTED = {"api_key", "admin_api_key"}
_SWITCHES = {
    "skip_tokenizer_init", "log_requests", "disable_radix_cache", "disable_overlap_schedule",
    "schedule_low_priority_values_first",
}  # fmt: skip

OUR_NAMES: tuple[Entry, ...] = (
    *(
        entry
        for names, vocabulary in _PLAIN
        for name in names.split()
        for entry in same(name, name, vocabulary, switch=name in _SWITCHES, listed=name in _LISTED)
    ),
    *same("device", "device", "both", wrong={ANY: _NO_DEVICE}, becomes={
        "auto": "auto", "cpu": "cpu", "cuda": "cuda"
    }),
    *same("tensor_parallel_size", "tensor_parallel_size", "both"),
    *same("disable_cuda_graph", "disable_cuda_graph", "sglang", switch=True),
    *same("cuda_graph_max_bs", "cuda_graph_max_bs", "sglang"),
    *same(
        "load_format",
        "load_format",
        "both",
        becomes={"hf": "auto"},
        wrong={"pt": _NOT_PICKLE, "npcache": _NOT_PICKLE},
    ),
    *same("dtype", "dtype", "both", becomes={
        "half": "float16", "float": "float32", "torch.float16": "float16", "torch.float32": "float32",
        "bf16": "bfloat16", "torch.bfloat16": "bfloat16",
    }),
    *same("quantization", "quantization -q", "both", becomes=_QUANTIZATION, wrong={ANY: _OTHER_QUANTIZATION}),
    *same(
        "kv_cache_dtype",
        "kv_cache_dtype",
        "both",
        becomes={"half": "float16", "float": "float32", "fp8": "fp8_e4m3", "bf16": "bfloat16"},
        wrong=dict.fromkeys(
            ("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "mxfp8", "nvfp4", "fp4_e2m1", "fp4_mx_block16"),
            _NOT_STORED,
        ),
    ),
    *same("tool_call_parser", "tool_call_parser", "both", becomes=_TOOL_CALLS, wrong={ANY: _OTHER_CALLS}),
    *same("reasoning_parser", "reasoning_parser", "both", becomes=_REASONING, wrong={ANY: _OTHER_REASONING}),
    *same(
        "speculative_algorithm",
        "speculative_algorithm",
        "sglang",
        becomes=_DRAFTS,
        wrong={ANY: _OTHER_DRAFTS},
    ),
    *same("speculative_num_draft_tokens", "speculative_num_draft_tokens", "sglang"),
    *same(
        "schedule_policy",
        "schedule_policy",
        "sglang",
        wrong={
            "random": "no order is left to chance",
            "routing-key": "a request carries no routing key: its prefix tells what it shares",
        },
    ),
    *same(
        "radix_eviction_policy",
        "radix_eviction_policy",
        "sglang",
        wrong=dict.fromkeys(("fifo", "mru", "filo"), "what is in use, or was of use, stays"),
    ),
    *same("attention_backend", "attention_backend", "both", becomes=_ATTENTION, wrong=_OTHER_ATTENTION),
)  # fmt: skip
"""Fields of ours that the others call the same; here are the values that they write otherwise."""

ALIASES: tuple[Entry, ...] = (
    *same("model_path", "model", "both"),
    *same("model_path", "model_tag", "vllm", note="as `sapwood serve MODEL` has it"),
    *same("context_length", "max_model_len", "vllm", wrong={
        "auto": "the length is not fitted to the memory: give a number",
        "-1": "the length is not fitted to the memory: give a number",
    }),
    *same("served_model_name", "served_model_name", "both", listed=True, note="one name; default works too"),
    *same("tensor_parallel_size", "tp_size tp", "sglang"),
    *same("tensor_parallel_size", "-tp", "vllm"),
    *same("deterministic", "enable_deterministic_inference", "sglang", switch=True, note=(
        "of a GPU; on a CPU answers are exact anyway"
    )),
    *same("attention_backend", "decode_attention_backend prefill_attention_backend", "sglang",
          becomes=_ATTENTION, wrong=_OTHER_ATTENTION, note="one backend does prefill and decode"),
    *same("disable_cuda_graph", "enforce_eager", "vllm", switch=True),
    *same("disable_cuda_graph", "disable_decode_cuda_graph", "sglang", switch=True),
    *same("disable_cuda_graph", "cuda_graph_backend_decode", "sglang",
          becomes={"disabled": True, "full": False}, also={"full": ("device", "cuda")},
          wrong={ANY: _WHOLE_STEPS}),
    *same("cuda_graph_max_bs", "cuda_graph_max_bs_decode", "sglang"),
    *same("cuda_graph_max_bs", "max_cudagraph_capture_size", "vllm",
          elsewhere={"0": ("disable_cuda_graph", True)}),
    *same("tokenizer_workers", "tokenizer_worker_num", "sglang"),
    *same("mem_fraction_static", "gpu_memory_utilization", "vllm", note=(
        "a share of the free memory, for the KV pool alone"
    )),
    *same("max_running_requests", "max_num_seqs", "vllm"),
    *same("max_queued_requests", "max_num_queued_reqs", "vllm", note="waiting requests alone"),
    *same("chunked_prefill_size", "max_num_batched_tokens", "vllm"),
    *same("chunked_prefill_size", "max_prefill_tokens", "sglang", note="one budget for chunks and steps"),
    *same("chunked_prefill_size", "enable_chunked_prefill", "vllm", switch=True,
          becomes={TRUE: None, FALSE: -1}),
    *same("disable_radix_cache", "enable_prefix_caching", "vllm", switch=True, becomes=_INVERSE),
    *same("disable_overlap_schedule", "async_scheduling", "vllm", switch=True, becomes=_INVERSE),
    *same("schedule_policy", "scheduling_policy", "vllm", also={
        "priority": ("schedule_low_priority_values_first", True),
    }),
    *same("schedule_policy", "enable_priority_scheduling", "sglang", switch=True,
          becomes={TRUE: "priority", FALSE: None}),
    *same("random_seed", "seed", "vllm"),
    *same("log_requests", "enable_log_requests", "vllm", switch=True),
    *same("log_requests", "disable_log_requests", "vllm", switch=True, becomes=_INVERSE),
    *same("log_stats", "disable_log_stats", "vllm", switch=True, becomes=_INVERSE),
    *same("log_format", "log_requests_format", "sglang", note="for every line of the log"),
    *same("speculative_algorithm", "spec_method", "vllm", becomes=_DRAFTS, wrong={ANY: _OTHER_DRAFTS}),
    *same("speculative_num_draft_tokens", "num_speculative_tokens spec_tokens", "vllm"),
    *same("drain_timeout", "shutdown_timeout", "vllm"),
)  # fmt: skip
