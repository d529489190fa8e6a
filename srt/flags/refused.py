"""Flags of others for what cannot be had here: the model, its loading, sampling, the server."""

from __future__ import annotations

from sapwood.srt.flags.entry import Entry, group

REFUSED: tuple[Entry, ...] = (
    # ---- model, tokenizer, weights
    *group("refused", "code that a model brings along never runs here", both="trust_remote_code?"),
    *group(
        "refused",
        "a model brings its own tokenizer",
        sglang="tokenizer_path",
        vllm="tokenizer",
        instead="put tokenizer.json into the model's folder",
    ),
    *group(
        "refused",
        "there is one tokenizer: the tokenizers library",
        both="tokenizer_mode=auto|fast|hf",
        sglang="tokenizer_backend=huggingface",
    ),
    *group(
        "refused",
        "one pool of processes tokenises and detokenises",
        sglang="detokenizer_worker_num=1",
        vllm="""
        tokenizer_pool_size=0 tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers=1
        """,
        instead="use --tokenizer-workers",
    ),
    *group(
        "refused",
        "requests are tokenised as they come",
        sglang="""
        enable_dynamic_batch_tokenizer? dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode?
        """,
    ),
    *group(
        "refused",
        "a model is what its folder or file holds: no revision is chosen",
        both="revision",
        vllm="code_revision tokenizer_revision",
    ),
    *group(
        "refused",
        "the folder of what is fetched is chosen by a variable",
        both="download_dir",
        instead="set SAPWOOD_CACHE",
    ),
    *group("refused", "no token of a hub is taken from the command line", vllm="hf_token"),
    *group(
        "refused",
        "what config.json says of the model is not overridden",
        sglang="json_model_override_args={}",
        vllm="""
        rope_scaling rope_theta hf_overrides={} hf_config_path model_class_overrides={} additional_config={}
        model_weights
        """,
        instead="change config.json",
    ),
    *group(
        "refused",
        "there is one implementation of a model",
        both="model_impl=auto|sglang|vllm",
        sglang="model_config_parser=auto|hf",
        vllm="config_format=auto|hf ir_op_priority",
    ),
    *group(
        "refused",
        "every model generates, and serves /v1/embeddings too",
        vllm="runner=auto|generate task=auto|generate convert=auto|none",
        instead="see --pooling",
    ),
    *group(
        "refused",
        "how prompts are pooled has a flag of its own",
        vllm="pooler_config override_pooler_config",
        instead="use --pooling",
    ),
    *group(
        "refused",
        "weights are used as they are stored, or as --dtype or --quantization w8 | w4 has them",
        vllm="""
        quantization_config allow_deprecated_quantization? calculate_kv_scales?
        kv_cache_dtype_skip_layers+
        """,
        sglang="""
        quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve? rl_quant_profile
        torchao_config enable_int8_mamba_checkpoint? int8_mamba_ckpt_size
        """,
    ),
    *group(
        "refused",
        "weights are read from local files, mapped into memory",
        both="model_loader_extra_config={}",
        sglang="""
        weight_loader_disable_mmap? weight_loader_prefetch_checkpoints?
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load?
        custom_weight_loader+ startup_weight_load_mode=serial
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports+
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine? engine_info_bootstrap_port
        modelexpress_config model_checksum delete_ckpt_after_loading? decrypted_config_file
        decrypted_draft_config_file weight_cache_mode=off weight_cache_socket weight_cache_timeout
        """,
        vllm="""
        safetensors_load_strategy=lazy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size ignore_patterns+ pt_load_map_location=cpu
        max_parallel_loading_workers
        """,
    ),
    *group(
        "refused",
        "weights are loaded once, at start",
        sglang="checkpoint_engine_wait_weights_before_ready? weight_version=default",
        vllm="weight_transfer_config",
    ),
    *group(
        "refused",
        "only text goes in: no image, sound or video",
        sglang="""
        enable_multimodal? mm_attention_backend enable_broadcast_mm_inputs_process?
        enable_prefix_mm_cache? mm_enable_dp_encoder? mm_process_config mm_processor_worker_num=0
        mm_io_worker_num=0 media_url_max_file_size_mb mm_preprocess_cache_size_mb=0
        trust_mm_content_hashes? limit_mm_data_per_request enable_mm_global_cache?
        image_processor_backend mm_global_cache_backend disable_fast_image_processor?
        mm_feature_transport keep_mm_feature_on_device? mm_max_concurrent_calls
        mm_per_request_timeout asr_max_buffer_seconds asr_max_concurrent_sessions
        enable_precise_embedding_interpolation? encoder_only? language_only?
        encoder_transfer_backend encoder_urls+ encoder_bootstrap_port encoder_register_urls+
        enable_adaptive_dispatch_to_encoder?
        """,
        vllm="""
        allowed_local_media_path limit_mm_per_prompt enable_mm_embeds? interleave_mm_strings?
        media_io_kwargs mm_processor_kwargs mm_processor_cache_gb=0 mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only? mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling?
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize? disable_chunked_mm_input?
        enable_mm_processor_stats? disable_mm_preprocessor_cache? ec_transfer_config
        ec_manager_config
        """,
        both="allowed_media_domains+",
    ),
    *group(
        "refused",
        "only text goes in: a model's other encoders are never loaded",
        both="language_model_only?=*",
    ),
    *group("refused", "a prompt is text or token ids", vllm="enable_prompt_embeds? io_processor_plugin"),
    *group(
        "refused",
        "diffusion language models are not served",
        sglang="dllm_algorithm dllm_algorithm_config dllm_fdfo?=*",
        vllm="diffusion_config",
    ),
    # ---- sampling and answers
    *group("refused", "a request may ask for at most 20 logprobs", vllm="max_logprobs=20"),
    *group("refused", "logprobs are of the model's own distribution", vllm="logprobs_mode=raw_logprobs"),
    *group(
        "refused",
        "a request's own values, then generation_config.json, are the sampling parameters",
        sglang="sampling_defaults=model preferred_sampling_params",
        vllm="generation_config=auto override_generation_config={}",
    ),
    *group(
        "refused",
        "no code of others runs on the logits",
        sglang="enable_custom_logit_processor?",
        vllm="logits_processors+ logits_processor_pattern",
    ),
    *group(
        "refused",
        "hidden states come from /v1/embeddings alone",
        sglang="enable_return_hidden_states? return_hidden_states_mode",
        instead="see --pooling",
    ),
    *group(
        "refused",
        "there is one sampler, exact for every batch",
        sglang="sampling_backend=pytorch",
        vllm="use_fp64_gumbel? return_sampling_mask? enable_batch_sharded_sampling?",
    ),
    *group(
        "refused",
        "tools are called by the client, not by the server",
        both="tool_server",
    ),
    *group(
        "refused",
        "parsers are not loaded from files",
        vllm="tool_parser_plugin reasoning_parser_plugin",
        instead="use --tool-call-parser and --reasoning-parser",
    ),
    *group(
        "refused",
        "a reasoning ends where the model ends it, and stays in the cache",
        sglang="strip_thinking_cache? enable_strict_thinking?",
        vllm="reasoning_config",
    ),
    *group(
        "refused",
        "white space in JSON is bounded by a number, not by a pattern",
        sglang="constrained_json_whitespace_pattern",
        instead="use --json-whitespace",
    ),
    *group(
        "refused",
        "a schema itself says which other properties there may be",
        vllm="guided_decoding_disable_additional_properties?",
    ),
    *group(
        "refused",
        "there is one engine of constraints, and nothing of it to be set",
        vllm="structured_outputs_config",
        instead="use --json-whitespace and --reasoning-parser",
    ),
    *group(
        "refused",
        "a piece of a stream is sent as soon as its tokens are there",
        sglang="batch_notify_size",
        instead="use --stream-interval",
    ),
    *group(
        "refused",
        "usage comes with a stream if stream_options.include_usage asks for it",
        sglang="stream_response_default_include_usage?",
        vllm="enable_force_include_usage?",
    ),
    *group(
        "refused",
        "native streams hold all of the text so far, OpenAI's hold pieces",
        sglang="incremental_streaming_output? stream_output?",
    ),
    *group(
        "refused",
        "each request carries its whole prompt: the cache finds what it knows of it",
        sglang="enable_streaming_session? enable_session_radix_cache?",
    ),
    *group("refused", "a prompt that is too long gets a 400", sglang="allow_auto_truncate?"),
    *group("refused", "the answer's role is the assistant", vllm="response_role=assistant"),
    *group(
        "refused",
        "tokens are told as text and bytes",
        vllm="return_tokens_as_token_ids? tokens_only?",
        instead="POST /generate takes and gives ids",
    ),
    *group("refused", "`system_fingerprint` is not made up", vllm="fingerprint_mode=none fingerprint_value"),
    *group(
        "refused",
        "message contents are given to the template as text",
        vllm="chat_template_content_format=auto|string",
    ),
    *group(
        "refused",
        "templates come with the model or from --chat-template, never with a request",
        vllm="trust_request_chat_template?",
        sglang="completion_template hf_chat_template_name",
    ),
    *group(
        "refused",
        "variables of the chat template come with each request",
        both="default_chat_template_kwargs",
        instead="send chat_template_kwargs",
    ),
    *group(
        "refused",
        "the Responses API is not served",
        vllm="""
        legacy_reasoning_events? reasoning_encryption_key enable_rate_limit_events?
        rate_limit_requests_per_minute
        """,
    ),
    # ---- HTTP, logs, metrics
    *group(
        "refused",
        "the server speaks plain HTTP/1.1",
        both="ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh?",
        sglang="ssl_keyfile_password enable_http2? http2_max_concurrent_streams",
        vllm="ssl_cert_reqs ssl_ciphers",
        instead="put a proxy with TLS before it",
    ),
    *group(
        "refused",
        "other origins may not call the server from a browser",
        vllm="allow_credentials? allowed_origins+ allowed_methods+ allowed_headers+",
        instead="let a proxy add the headers",
    ),
    *group(
        "refused",
        "the server is one process on one TCP port",
        vllm="""
        uds api_server_count=1 -asc=1 headless? middleware+ disable_frontend_multiprocessing? grpc?
        """,
        sglang="""
        grpc_mode? smg_grpc_mode? grpc_port sidecar sidecar_args+ smg_http_sidecar_port/grpc_http_sidecar_port
        """,
    ),
    *group(
        "refused",
        "routes have no prefix",
        vllm="root_path",
        sglang="fastapi_root_path",
        instead="let a proxy strip it",
    ),
    *group(
        "refused", "there are no pages with docs; /openapi.json is always there", vllm="disable_fastapi_docs?"
    ),
    *group(
        "refused",
        "headers and lines are limited by the HTTP parser's own defaults",
        vllm="h11_max_incomplete_event_size h11_max_header_count",
        instead="see --max-body-bytes",
    ),
    *group(
        "refused", "the request id is a header of every answer already", vllm="enable_request_id_headers?=*"
    ),
    *group("refused", "/server_info and /metrics tell the load", vllm="enable_server_load_tracking?"),
    *group(
        "refused",
        "/tokenize and /detokenize tell what the tokenizer does",
        vllm="enable_tokenizer_info_endpoint?",
    ),
    *group("refused", "nothing that a client sends is stored", sglang="file_storage_path crash_dump_folder"),
    *group("refused", "flags come from the command line and from SAPWOOD_ variables", both="config"),
    *group(
        "refused",
        "the texts of requests are never logged",
        sglang="log_requests_level=1 log_requests_target=stderr",
        vllm="enable_log_outputs? enable_log_deltas?=false max_log_len=0",
    ),
    *group(
        "refused",
        "one level holds for all that is logged",
        sglang="log_level_http=warning|error|critical",
        vllm="""
        uvicorn_log_level=warning|error|critical log_config_file aggregate_engine_logging?
        log_error_stack?
        """,
        instead="use --log-level",
    ),
    *group(
        "refused",
        "the buckets and labels of the metrics are fixed",
        sglang="""
        bucket_time_to_first_token+ bucket_inter_token_latency+ bucket_e2e_request_latency+
        prompt_tokens_buckets+ generation_tokens_buckets+ extra_metric_labels
        collect_tokens_histogram? tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels+ enable_metrics_for_all_schedulers?
        load_snapshot_publish_interval decode_log_interval export_metrics_to_file?
        export_metrics_to_file_dir gc_warning_threshold_secs=0 gc_threshold+
        enable_request_time_stats_logging? show_time_cost? enable_forward_pass_metrics?
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name stat_loggers
        """,
        both="enable_mfu_metrics? kv_events_config",
        vllm="""
        show_hidden_metrics_for_version kv_cache_metrics? kv_cache_metrics_sample cudagraph_metrics?
        enable_logging_iteration_details? per_request_spec_decode_metrics=none
        disable_log_stats_interval
        """,
        instead="see /metrics",
    ),
    *group(
        "refused",
        "no traces are exported",
        both="otlp_traces_endpoint",
        sglang="enable_trace? trace_modules=request",
        vllm="""
        collect_detailed_traces+ enable_trace_replay? profiler_config jit_monitor_mode
        jit_monitor_verbose? ray_workers_use_nsight? enable_layerwise_nvtx_tracing?
        """,
    ),
    *group(
        "refused",
        "tensors are not dumped, and nothing hooks into the forward",
        sglang="""
        debug_tensor_dump_output_folder debug_tensor_dump_layers+ debug_tensor_dump_input_file
        debug_tensor_dump_inject? forward_hooks+ msprobe_dump_config enable_layerwise_nvtx_marker?
        kv_canary=none kv_canary_real_data=none kv_canary_sweep_interval=0 custom_sigquit_handler
        enable_nan_detection?
        """,
    ),
    *group(
        "refused",
        "a long forward is never taken for a death",
        sglang="watchdog_timeout soft_watchdog_timeout",
        vllm="engine_iteration_timeout_s",
        instead="see --heartbeat-timeout",
    ),
    *group("refused", "the server warms up nothing", sglang="warmups"),
)
