"""Flags of others for what cannot be had here: parallelism, memory, scheduling, kernels, adapters, drafts."""

from __future__ import annotations

from sapwood.srt.flags.entry import Entry, group

_CACHE = "there is one radix cache, in the worker's memory"

REFUSED_ENGINE: tuple[Entry, ...] = (
    # ---- devices and parallelism
    *group("refused", "the model runs on an NVIDIA GPU or on the CPU", sglang="mlx_enable_sampling?"),
    *group(
        "refused",
        "every layer is shared out in one way among --tensor-parallel-size workers",
        sglang="""
        moe_dense_tp_size=1 enable_attn_tp_input_scattered? disable_attn_tp_gather?
        enable_dense_mlp_attn_tp? enable_shared_experts_attn_tp? enable_p2p_check?
        """,
    ),
    *group(
        "refused",
        "pipeline parallelism is not there: every worker has a part of every layer",
        both="pipeline_parallel_size=1",
        sglang="""
        pp_size=1 pp=1 pp_max_micro_batch_size pp_async_batch_depth=0 enable_dynamic_chunking?
        """,
        vllm="-pp=1",
    ),
    *group(
        "refused",
        "data parallelism is not there",
        both="data_parallel_size=1",
        sglang="""
        dp_size=1 dp=1 load_balance_method=auto enable_dp_attention?
        enable_dp_attention_local_control_broadcast?
        enable_dp_lm_head? enable_tp_lm_head_all_to_all? prefill_round_robin_balance?
        enable_prefill_delayer? prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets+
        prefill_delayer_wait_seconds_buckets+ prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms
        """,
        vllm="""
        -dp=1 data_parallel_rank/-dpn=0 data_parallel_start_rank/-dpr=0
        data_parallel_size_local/-dpl=1 data_parallel_address/-dpa data_parallel_rpc_port/-dpp
        data_parallel_backend/-dpb=mp data_parallel_hybrid_lb/-dph? data_parallel_external_lb/-dpe?
        data_parallel_multi_port_external_lb? data_parallel_supervisor_port dp_sync_interval
        prefill_schedule_interval=1 disable_nccl_for_dp_synchronization?=*
        """,
        instead="start several servers behind a balancer",
    ),
    *group(
        "refused",
        "context parallelism is not there",
        both="decode_context_parallel_size=1 dcp_comm_backend",
        sglang="""
        dcp_size=1 attn_cp_size=1 attention_context_parallel_size=1 dcp_replicate_q_proj?
        enable_prefill_cp? cp_strategy enable_dsa_cache_layer_split?
        enable_dsa_prefill_context_parallel? dsa_prefill_cp_mode nsa_prefill_cp_mode
        enable_nsa_prefill_context_parallel? enable_prefill_context_parallel? prefill_cp_mode
        enable_cp_decode_attn_tp?
        """,
        vllm="""
        -dcp=1 prefill_context_parallel_size/-pcp=1 dcp_q_replicate? dcp_kv_cache_interleave_size=1
        cp_kv_cache_interleave_size=1
        """,
    ),
    *group(
        "refused",
        "mixtures of experts are not served: there are no experts to place",
        both="enable_eplb? enable_return_routed_experts?",
        sglang="""
        ep_size=1 expert_parallel_size=1 ep=1 moe_dp_size=1 moe_data_parallel_size=1 dwdp_size=1
        moe_a2a_backend=none moe_runner_backend=auto enable_deepep_moe? enable_ep_moe?
        deepep_mode=auto deepep_v2_mode fuseep_mode deepep_dispatcher_output_dtype=auto
        deepep_config enable_w4a4_mxfp4_megamoe? flashinfer_mxfp4_moe_precision=default
        enable_flashinfer_cutlass_moe? enable_flashinfer_trtllm_moe? ep_num_redundant_experts=0
        ep_dispatch_algorithm init_expert_location=trivial eplb_algorithm=auto
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode=off
        enable_expert_distribution_metrics? elastic_ep_backend=none enable_elastic_expert_backup?
        mooncake_ib_device enable_waterfill? elastic_ep_join_mode elastic_ep_join_rank_offset=0
        ep_join_mode ep_join_rank_offset=0 elastic_ep_initial_size max_ep_size
        elastic_ep_scale_timeout elastic_ep_rejoin? disable_flashinfer_cutlass_moe_fp4_allgather?=*
        disable_shared_experts_fusion?=* enforce_shared_experts_fusion?
        enable_fused_moe_sum_all_reduce? kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token kt_amx_weight_path
        enable_return_indexer_topk? enable_two_batch_overlap? enable_single_batch_overlap?
        tbo_token_distribution_threshold
        """,
        vllm="""
        enable_expert_parallel/-ep? enable_ep_weight_filter? moe_backend=auto all2all_backend
        enable_elastic_ep? eplb_config expert_placement_strategy=linear enable_dbo? ubatch_size=0
        dbo_decode_token_threshold dbo_prefill_token_threshold num_redundant_experts=0
        eplb_window_size eplb_step_interval eplb_log_balancedness? enable_bf16x3_router_gemm?
        """,
    ),
    *group(
        "refused",
        "one machine runs the whole runtime",
        both="nnodes=1 node_rank=0",
        sglang="""
        nccl_port dist_timeout dist_init_addr/nccl_init_addr gated_launch_port use_ray?
        base_gpu_id=0 gpu_id_step=1 numa_node+ enable_symm_mem? enable_nccl_nvls? enable_mscclpp?
        enable_torch_symm_mem? enable_scattered_sconv? pre_warm_nccl? enable_quant_communications?
        enable_flashinfer_allreduce_fusion? enforce_disable_flashinfer_allreduce_fusion?=*
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion?
        """,
        vllm="""
        -n=1 -r=0 distributed_executor_backend=uni|mp master_addr master_port
        distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind? numa_bind_nodes+
        numa_bind_cpus+ device_ids+ worker_use_ray? worker_cls=auto worker_extension_cls
        enable_fault_tolerance? fault_tolerance_config enable_nccl_comm_suspend?
        _api_process_count=1 _api_process_rank=0
        """,
        instead="the GPUs, or sockets, of one machine are used together by --tensor-parallel-size",
    ),
    *group(
        "refused",
        "prefill and decode run in one worker",
        sglang="""
        disaggregation_mode=null disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache?
        disaggregation_decode_enable_offload_kvcache? disaggregation_decode_retraction_backup
        disaggregation_decode_tp disaggregation_decode_dp disaggregation_prefill_pp
        num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts=0 enable_pdmux?
        pdmux_config_path sm_group_num
        """,
        vllm="kv_transfer_config",
    ),
    # ---- memory and cache
    *group(
        "refused",
        "a page is one token, so that any prefix is shared to the token",
        sglang="page_size=1 c128_page_size",
        vllm="block_size=1 prefix_match_unit=1",
    ),
    *group(
        "refused",
        "nothing is moved to another memory: a row that does not fit is retracted and computed again",
        both="""
        cpu_offload_gb=0 offload_group_size=-1|0 offload_num_in_group=1 offload_prefetch_step=1
        """,
        sglang="""
        offload_mode=cpu enable_memory_saver? enable_weights_cpu_backup?
        enable_draft_weights_cpu_backup?
        """,
        vllm="""
        swap_space=0 offload_backend=auto cpu_offload_params+ offload_params+ kv_offloading_size=0
        kv_offloading_backend=native preemption_mode=recompute enable_sleep_mode?
        enable_cumem_allocator?
        """,
    ),
    *group(
        "refused",
        "the KV pool is sized in tokens, or by a share of the memory",
        vllm="num_gpu_blocks_override kv_cache_memory_bytes kv_cache_memory",
        instead="use --max-total-tokens or --mem-fraction-static",
    ),
    *group(
        "refused",
        _CACHE,
        sglang="""
        enable_hierarchical_cache? hicache_host_memory_mode hicache_ratio hicache_size=0
        hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config enable_lmcache?
        lmcache_config_file enable_flexkv? flexkv_config_file radix_cache_backend
        enable_unified_memory? enable_page_major_kv_layout? prefill_only_disable_kv_cache?
        disable_chunked_prefix_cache?=* enable_double_sparsity?
        ds_channel_config_path ds_heavy_channel_num ds_heavy_token_num ds_heavy_channel_type
        ds_sparse_decode_threshold enable_hisparse? hisparse_config/hierarchical_sparse_attention_extra_config
        swa_full_tokens_ratio=1
        """,
        vllm="""
        prefix_caching_hash_algo prefix_cache_retention_interval kv_sharing_fast_prefill?
        disable_sliding_window?
        """,
    ),
    # ---- scheduling
    *group(
        "refused",
        "with --schedule-policy priority, any request of a higher priority may take the place of a lower one",
        sglang="disable_priority_preemption? priority_scheduling_preemption_threshold=0|1",
    ),
    *group(
        "refused",
        "a request without a priority has 0",
        sglang="default_priority_value=0",
        instead="send the priority with the request",
    ),
    *group(
        "refused",
        "admission follows from the slots that are free and the budget of a step",
        sglang="""
        prefill_max_requests prefill_decode_interval=0
        min_free_slots_delay=1 retraction_policy
        """,
        vllm="""
        max_num_scheduled_tokens max_num_queued_tokens max_num_partial_prefills=1
        max_long_partial_prefills=1 long_prefill_token_threshold=0 scheduler_reserve_full_isl?
        watermark=0 scheduler_delay_factor=0 scheduler_cls
        """,
        instead="use --max-running-requests, --chunked-prefill-size and --schedule-conservativeness",
    ),
    *group(
        "refused",
        "a step draws one token for each row",
        sglang="num_continuous_decode_steps=1 scheduler_recv_interval=1",
        vllm="""
        num_scheduler_steps=1 multi_step_stream_outputs?=* num_lookahead_slots=0
        use_v2_block_manager?=*
        """,
    ),
    *group(
        "refused",
        "the scheduler's own overlap is the only one",
        vllm="disable_async_output_proc?",
        instead="use --disable-overlap-schedule",
    ),
    # ---- kernels, graphs, compilation
    *group(
        "refused",
        "one attention algorithm does prefill and decode",
        vllm="attention_config -ac override_attention_dtype",
        instead="use --attention-backend",
    ),
    *group(
        "refused",
        "CUDA graphs are of decode steps, of sizes of their own up to --cuda-graph-max-bs",
        sglang="""
        cuda_graph_config cuda_graph_backend_prefill=disabled
        cuda_graph_bs+ cuda_graph_max_bs_prefill disable_cuda_graph_padding?
        cuda_graph_bs_decode+ cuda_graph_bs_prefill+ cuda_graph_tc_compiler
        enable_profile_cuda_graph? enable_cudagraph_gc? debug_cuda_graph?
        enable_breakable_cuda_graph? enable_piecewise_cuda_graph? piecewise_cuda_graph_max_tokens
        piecewise_cuda_graph_tokens+ piecewise_cuda_graph_compiler
        """,
        vllm="""
        cudagraph_capture_sizes+ cuda_graph_sizes+ max_seq_len_to_capture
        """,
    ),
    *group(
        "refused",
        "torch.compile is not used; for CUDA graphs see --disable-cuda-graph and --cuda-graph-max-bs",
        sglang="""
        enable_torch_compile? enable_torch_compile_debug_mode? torch_compile_max_bs
        """,
        vllm="""
        compilation_config=0 -cc=0 -O=0 -O0?=* -O1? -O2? -O3? optimization_level=0
        performance_mode=balanced
        """,
    ),
    *group(
        "refused",
        "which kernel computes what is not chosen one by one: see --attention-backend and --deterministic",
        sglang="""
        fp8_gemm_backend=auto fp8_gemm_runner_backend=auto fp4_gemm_backend=auto
        fp4_gemm_runner_backend=auto bf16_gemm_backend=auto dsa_prefill_backend
        dsv4_prefill_backend=auto dsa_decode_backend dsa_paged_mqa_logits_backend=auto
        dsa_topk_backend nsa_prefill_backend nsa_decode_backend disable_flashinfer_autotune?=*
        flashinfer_autotune_skip_ops+ triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged?=* enable_fused_qk_norm_rope?
        enable_deepseek_v4_fp4_indexer? enable_tf32_matmul? enable_flashinfer_mla? enable_flashmla?
        enable_triton_kernel_moe? rl_on_policy_target enable_mis? multi_item_scoring_delimiter
        enable_flash_mla?
        """,
        vllm="""
        kernel_config enable_flashinfer_autotune? linear_backend=auto gdn_prefill_backend
        kda_prefill_backend=auto
        """,
    ),
    *group(
        "refused",
        "state-space and linear-attention models are not served",
        both="""
        mamba_backend=triton mamba_cache_philox_rounds=0 enable_mamba_cache_stochastic_rounding?
        """,
        sglang="""
        max_mamba_cache_size mamba_ssm_dtype mamba_max_states_per_path=-1 mamba_full_memory_ratio
        mamba_radix_cache_strategy=auto mamba_track_interval mamba_scheduler_strategy=auto
        linear_attn_backend=triton linear_attn_decode_backend linear_attn_prefill_backend
        linear_attn_verify_backend enable_linear_replayssm? linear_replayssm_cache_len
        enable_linear_replayssm_spec?
        """,
        vllm="""
        mamba_config mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto mamba_block_size
        mamba_cache_mode=none replayssm_buffer_len use_replayssm? mamba_ssu_algorithm
        """,
    ),
    # ---- adapters and drafts
    *group(
        "refused",
        "adapters (LoRA) are not there yet",
        both="enable_lora? max_lora_rank lora_target_modules+",
        sglang="""
        lora_paths+ lora_backend max_loras_per_batch max_loaded_loras lora_eviction_policy
        max_lora_chunk_size enable_lora_overlap_loading? experts_shared_outer_loras?
        lora_use_virtual_experts? lora_strict_loading? lora_drain_wait_threshold=0
        """,
        vllm="""
        lora_modules+ max_loras max_cpu_loras lora_dtype fully_sharded_loras? default_mm_loras
        enable_tower_connector_lora? specialize_active_lora? enable_mixed_moe_lora_format?
        enable_moe_shared_loras? enable_lora_bias? lora_extra_vocab_size long_lora_scaling_factors
        qlora_adapter_name_or_path enable_prompt_adapter? max_prompt_adapters
        max_prompt_adapter_token=0 prompt_adapters+
        """,
    ),
    *group(
        "refused",
        "drafts come from a grammar, the prefix cache and the request's own text, not from a second model",
        sglang="""
        speculative_draft_model_path/speculative_draft_model
        speculative_draft_model_revision speculative_draft_load_format speculative_num_steps
        speculative_eagle_topk speculative_dflash_block_size
        speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier?
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_rejection_sampling? speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_draft_model_quantization speculative_skip_dp_mlp_sync? enable_multi_layer_eagle?
        speculative_adaptive? speculative_adaptive_config decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints+ decoupled_spec_rank decoupled_spec_role=null
        spec_trace_dir speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget=0
        speculative_ngram_external_corpus_max_tokens speculative_ngram_min_match_window_size
        speculative_ngram_max_match_window_size speculative_ngram_branch_length
        """,
        vllm="""
        speculative_config -sc spec_model speculative_model
        speculative_model_quantization speculative_draft_tensor_parallel_size
        speculative_disable_mqa_scorer? speculative_max_model_len speculative_disable_by_batch_size
        ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method
        typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
        disable_logprobs_during_spec_decoding?
        """,
        instead="use --speculative-algorithm and --speculative-num-draft-tokens",
    ),
)
