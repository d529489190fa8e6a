"""Flags of others that ask for what happens anyway."""

from __future__ import annotations

from sapwood.srt.flags.entry import Entry, group

ANYWAY: tuple[Entry, ...] = (
    *group("anyway", "a step always mixes prefill and decode", sglang="enable_mixed_chunk?"),
    *group("anyway", "/metrics is always there", sglang="enable_metrics?"),
    *group(
        "anyway",
        "`usage` always tells the cached tokens",
        sglang="enable_cache_report?",
        vllm="enable_prompt_tokens_details?",
    ),
    *group(
        "anyway",
        "decode steps alone are captured as CUDA graphs",
        sglang="disable_prefill_cuda_graph?=* disable_piecewise_cuda_graph?=*",
    ),
    *group(
        "anyway",
        "there is no access log",
        sglang="uvicorn_access_log_exclude_prefixes+=*",
        vllm="disable_uvicorn_access_log? disable_access_log_for_endpoints=*",
    ),
    *group("anyway", "there is no warm-up", sglang="skip_server_warmup?=*"),
    *group("anyway", "a misspelt SAPWOOD_ variable is an error", vllm="fail_on_environ_validation?"),
    *group("anyway", "no custom all-reduce is used", both="disable_custom_all_reduce?=*"),
    *group("anyway", "every generative model serves /v1/embeddings too", sglang="is_embedding?=*"),
    *group(
        "anyway",
        "one pool holds the KV of every layer",
        sglang="disable_hybrid_swa_memory?",
        vllm="disable_hybrid_kv_cache_manager?",
    ),
    *group(
        "anyway",
        "logits are computed in float32",
        sglang="enable_fp32_lm_head? triton_attention_reduce_in_fp32?",
    ),
    *group(
        "anyway",
        "each choice is decoded by itself, token by token",
        sglang="disable_tokenizer_batch_decode?=*",
    ),
    *group("anyway", "an idle scheduler sleeps", sglang="sleep_on_idle?"),
    *group(
        "anyway",
        "attention that reads a shared prefix once changes no bit of an answer",
        vllm="disable_cascade_attn?",
    ),
    *group(
        "anyway",
        "a request with a priority gets a 400 where nothing goes by priorities",
        sglang="abort_on_priority_when_disabled?",
    ),
    *group("anyway", "nothing is kept on a disk for grammars", sglang="disable_outlines_disk_cache?"),
    *group(
        "anyway",
        "one engine enforces every constraint to the letter",
        sglang="grammar_backend=llguidance|xgrammar|auto",
        vllm="guided_decoding_backend=auto|guidance|xgrammar guided_decoding_disable_fallback?=*",
    ),
    *group(
        "anyway",
        "a constrained JSON document has its separators alone, unless --json-whitespace says otherwise",
        sglang="constrained_json_disable_any_whitespace?",
        vllm="guided_decoding_disable_any_whitespace?",
    ),
    *group(
        "anyway",
        "calls of tools are parsed wherever a request has tools",
        vllm="enable_auto_tool_choice?",
    ),
    *group(
        "anyway",
        "with tool_choice none the model is told of no tools",
        vllm="exclude_tools_when_tool_choice_none?",
    ),
    *group("anyway", "reasoning is told apart wherever the model has it", vllm="enable_reasoning?"),
    *group("anyway", "no progress bar is drawn while weights load", vllm="use_tqdm_on_load?=false"),
)
