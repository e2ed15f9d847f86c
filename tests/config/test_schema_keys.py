"""Effect of every key of a deployment file. The table names the test of each key."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from mstar_core.config.schema import SETTINGS

ROOT = Path(__file__).resolve().parents[2]

ACTS: Final[dict[str, str]] = {
    "model": "tests/runtime/test_goldens.py::test_greedy_ids_as_sound",
    "name": "tests/runtime/test_start_failures.py::"
    "test_a_second_deployment_of_a_name_is_refused_and_harms_not_the_first",
    "weights": "tests/runtime/test_start_failures.py::test_a_missing_folder_is_named",
    "dtype": "tests/worker/test_build.py::test_dtypes_and_attention_follow_the_device",
    "attention": "tests/worker/test_build.py::test_dtypes_and_attention_follow_the_device",
    "quantization": "plugins/mstar-pi05/tests/test_flow.py::test_weights_of_eight_bits_stay_near",
    "memory_limit": "tests/worker/test_build.py::test_a_limited_rank_leaves_what_caches_leave_of_a_device",
    "memory_budget": "tests/cli/life/test_budget.py::test_the_plan_shows_who_holds_what_what_it_takes_and_what_is_left",
    "max_seq_len": "tests/engine/test_kv_lifecycle.py::test_the_context_limit_ends_a_loop_by_length",
    "max_concurrent_requests": "tests/api/test_errors.py::"
    "test_beyond_the_queue_requests_are_refused_with_a_time_to_wait",
    "max_queue": "tests/api/test_errors.py::test_beyond_the_queue_requests_are_refused_with_a_time_to_wait",
    "token_budget": "tests/engine/test_kv_results.py::test_chunked_prefill_equals_whole",
    "image_share": "tests/engine/test_device_share.py::test_time_follows_the_share_while_both_wait",
    "steps_at_once": "tests/engine/test_steps_at_once.py::test_a_launch_holds_as_many_steps_as_the_settings_allow",
    "yield_to_sound": "tests/worker/test_playback_slack.py::test_32_clients_with_images_hear_no_gaps",
    "first_sound_requests": "tests/worker/test_first_sound_order.py::test_without_it_steps_run_ahead_of_a_first_sound",
    "feature_cache_bytes": "tests/worker/test_feature_cache.py::test_a_limit_of_zero_keeps_nothing",
    "wait_spin_us": "tests/runtime/test_wait_spin.py::"
    "test_processes_spin_for_a_while_after_a_request_and_sleep_when_nobody_asks",
    "resume": "tests/api/test_service_faults.py::"
    "test_without_resumption_the_death_of_the_conductor_fails_every_open_request_and_refuses_new_ones",
    "warm": "tests/worker/test_build.py::test_a_full_warm_up_captures_all_that_is_planned",
    "standby": "tests/supervisor/test_standby.py::test_a_deployment_beside_gpus_has_one_unless_it_is_switched_off",
    "hang_s": "tests/supervisor/test_health.py::test_a_process_hangs_by_what_it_sends_and_whether_it_computes",
    "step_limit_s": "tests/supervisor/test_health.py::test_a_process_hangs_by_what_it_sends_and_whether_it_computes",
    "model_kwargs": "plugins/mstar-pi05/tests/test_robots.py::test_a_robot_gets_the_actions_that_generate_gives",
    "node_groups": "tests/runtime/test_goldens.py::test_other_placements_give_the_bytes_of_one_rank",
    "node_groups[].node_names": "tests/runtime/test_goldens.py::test_other_placements_give_the_bytes_of_one_rank",
    "node_groups[].ranks": "tests/runtime/test_goldens.py::test_replicas_share_the_requests",
    "node_groups[].graph_walks": "tests/conductor/test_conductor.py::"
    "test_a_walk_goes_to_the_rank_that_holds_its_node_for_it",
    "node_groups[].tp_size": "tests/parallel/test_served.py::test_two_ranks_speak_as_one_does",
    "node_groups[].memory_fraction": "tests/worker/test_build.py::test_the_nodes_of_a_rank_divide_its_share",
    "node_groups[].device_gb": "tests/cli/life/test_choice.py::test_a_file_needs_the_memory_that_it_states",
    "kv_cache": "tests/engine/test_sizing.py::test_pages_and_tokens_fix_the_size",
    "kv_cache.page_size": "tests/engine/test_sizing.py::test_the_page_of_a_node_overrides_the_deployments",
    "kv_cache.pages": "tests/engine/test_sizing.py::test_pages_and_tokens_fix_the_size",
    "kv_cache.tokens": "tests/engine/test_sizing.py::test_pages_and_tokens_fix_the_size",
    "kv_cache.memory_fraction": "tests/worker/test_build.py::"
    "test_without_a_plans_share_the_deployments_holds_and_the_reserve_is_kept",
    "kv_cache.reserve_bytes": "tests/worker/test_build.py::"
    "test_without_a_plans_share_the_deployments_holds_and_the_reserve_is_kept",
    "kv_cache.share": "tests/worker/test_build.py::test_the_nodes_of_a_rank_divide_its_share",
    "kv_cache.prefix_cache": "tests/runtime/test_goldens_engine.py::test_a_prefix_cache_hit_changes_no_id",
    "kv_cache.share_between_keys": "tests/api/test_access.py::test_keys_share_no_cache_unless_the_file_says_so",
    "lora": "tests/cli/life/test_adapters.py::test_the_room_follows_the_adapters_of_the_start",
    "lora.adapters": "tests/cli/life/test_adapters.py::test_the_room_follows_the_adapters_of_the_start",
    "lora.max_adapters": "tests/cli/life/test_adapters.py::test_adapters_beyond_the_room_are_refused_at_their_key",
    "lora.max_rank": "tests/cli/life/test_adapters.py::test_adapters_beyond_the_room_are_refused_at_their_key",
    "transport": "tests/runtime/test_moves.py::test_caches_by_each_transport_give_the_speech_of_one_rank",
    "transport.protocol": "tests/runtime/test_moves.py::test_caches_by_each_transport_give_the_speech_of_one_rank",
    "transport.port": "tests/worker/test_peer_memory_transports.py::"
    "test_the_successor_of_a_dead_owner_is_read_at_ports_of_its_window",
    "transport.device": "tests/worker/test_peer_memory_namespaces.py::"
    "test_ranks_in_two_network_namespaces_exchange_tensors",
    "ray": "tests/cli/life/test_up_hosts.py::test_ranks_are_placed_here_first_and_then_on_as_few_hosts_as_possible",
    "ray.address": "tests/cli/life/test_up_hosts.py::test_"
    "ranks_are_placed_here_first_and_then_on_as_few_hosts_as_possible",
    "ray.devices": "tests/cli/life/test_up_hosts.py::test_listed_devices_are_used_in_their_order",
    "ray.spread": "tests/cli/life/test_up_hosts.py::test_spread_places_replicas_on_different_hosts",
    "ray.network": "tests/cli/life/test_up_hosts.py::test_the_network_between_the_hosts_gives_their_addresses",
    "ray.ports": "tests/transport/test_remote.py::test_ports_come_from_the_range_and_its_end_is_an_error",
    "logs": "tests/supervisor/test_log_file.py::test_a_new_start_prunes_by_the_file",
    "logs.keep_starts": "tests/supervisor/test_log_file.py::test_a_new_start_prunes_by_the_file",
    "logs.max_bytes": "tests/supervisor/test_log_file.py::test_a_log_is_rotated_at_its_size",
    "logs.max_days": "tests/supervisor/test_log_file.py::test_a_log_is_rotated_at_half_of_its_days",
    "api": "tests/api/test_app_keys.py::test_the_port_is_open_at_the_address_of_the_file_and_at_no_other",
    "api.host": "tests/api/test_app_keys.py::test_the_port_is_open_at_the_address_of_the_file_and_at_no_other",
    "api.port": "tests/runtime/test_start_failures.py::test_a_taken_port_is_named_with_a_free_one",
    "sleep_copies": "tests/worker/test_sleep.py::test_the_weights_of_a_gpu_keep_their_copy_only_if_the_key_says_so",
    "sleepable": "tests/worker/test_sleep.py::test_a_gpu_rank_sleeps_only_if_its_memory_was_placed_for_that",
    "api.wake_on_request": "tests/api/test_link_sleep.py::test_without_wake_on_request_a_sleeping_deployment_refuses",
    "api.bind_when_ready": "tests/api/test_errors.py::test_the_port_may_open_only_when_the_deployment_is_ready",
    "api.console": "tests/web/test_routes.py::test_without_the_console_there_is_no_page",
    "api.aliases": "tests/api/test_errors.py::test_a_model_has_the_names_of_its_deployment_too",
    "api.strict_model": "tests/api/test_errors.py::test_another_models_name_is_refused_only_when_strict",
    "api.api_key_file": "tests/host/test_api_keys.py::test_a_reload_replaces_the_keys_of_the_files",
    "api.metrics_key_file": "tests/api/test_app_reload.py::test_a_metrics_key_opens_the_metrics_alone",
    "api.metrics_open": "tests/api/test_app_keys.py::test_metrics_need_a_key_unless_they_are_open",
    "api.unknown_params": "tests/api/test_errors.py::test_unknown_parameters_may_be_a_warning",
    "api.timeout_s": "tests/api/test_app_keys.py::test_a_request_lives_as_long_as_the_file_says",
    "api.stall_timeout_s": "tests/api/test_service_faults.py::"
    "test_a_client_that_does_not_read_is_cancelled_and_others_are_not_slowed",
    "api.max_body_bytes": "tests/api/test_media_limits.py::test_bodies_texts_and_files_hold_their_limits",
    "api.max_text_bytes": "tests/api/test_media_limits.py::test_bodies_texts_and_files_hold_their_limits",
    "api.max_files": "tests/api/test_media_limits.py::test_bodies_texts_and_files_hold_their_limits",
    "api.max_speech_chars": "tests/api/test_media_limits.py::test_bodies_texts_and_files_hold_their_limits",
    "api.max_prompts": "tests/api/test_completions.py::test_what_is_wrong_is_refused_by_field",
    "api.max_n": "tests/api/test_media_limits.py::test_bodies_texts_and_files_hold_their_limits",
    "api.pool_processes": "tests/api/test_app_keys.py::test_as_many_processes_read_media_as_the_file_says",
    "api.max_connections": "tests/api/test_connection.py::test_idle_connections_beyond_the_limit_make_room",
    "api.max_requests_per_key": "tests/api/test_access.py::test_a_key_has_a_limit_of_its_own",
    **{
        f"api.responses_{key}": "tests/api/test_responses.py::test_limits_of_the_store_reach_it"
        for key in ("ttl_s", "max_count", "max_bytes")
    },
    **{
        f"api.videos_{key}": "tests/api/test_videos.py::test_limits_of_the_store_reach_it"
        for key in ("ttl_s", "max_bytes")
    },
    "api.videos_timeout_s": "plugins/mstar-wan22/tests/test_served_videos.py::test_a_video_has_a_time_limit_of_its_own",
    **{
        f"api.sessions_{key}": "tests/api/test_sessions.py::test_limits_of_the_deployment_reach_the_sessions"
        for key in ("idle_s", "ttl_s", "max_count")
    },
    "api.sessions_media_bytes": "tests/api/test_session_media.py::"
    "test_without_room_for_images_every_request_decodes_them",
    "api.realtime_max_sessions": "tests/api/realtime/test_realtime_sessions.py::"
    "test_sessions_have_a_limit_and_those_without_a_connection_give_way",
    **{
        f"api.realtime_{key}": "tests/api/realtime/test_realtime_sessions.py::"
        "test_an_old_or_idle_session_ends_with_a_reason"
        for key in ("idle_s", "max_s")
    },
    **{
        f"api.realtime_ice_servers{part}": "tests/api/realtime/test_ice_servers.py::"
        "test_a_client_secret_comes_with_the_servers"
        for part in ("", "[].urls", "[].secret_file")
    },
    **{
        f"api.realtime_ice_servers[].{word}": "tests/api/realtime/test_ice_servers.py::"
        "test_users_of_a_secret_expire_and_have_the_password_of_the_turn_rest_api"
        for word in ("username", "credential_file")
    },
    "api.tls_cert": "tests/api/test_access.py::test_with_a_certificate_the_port_speaks_https_alone",
    "api.tls_key": "tests/api/test_access.py::test_with_a_certificate_the_port_speaks_https_alone",
    "api.cors_origins": "tests/api/test_access.py::test_named_origins_may_call_and_others_may_not",
    "api.remote_media": "tests/api/test_media_fetch.py::test_an_allowed_host_is_fetched_over_a_real_connection",
    **{
        f"api.{key}": "tests/api/test_media_limits.py::test_the_deployments_limits_reach_the_pool"
        for key in ("max_image_pixels", "max_audio_s", "max_video_s", "max_video_frames")
    },
    **{
        f"api.{key}": "tests/api/test_app_keys.py::test_the_remaining_limits_of_media_reach_the_pool"
        for key in ("max_image_side", "max_video_width", "max_video_height", "max_decoded_bytes")
    },
}


def test_no_key_is_without_a_test_of_what_it_does() -> None:
    assert set(ACTS) == {item.key for item in SETTINGS}


@pytest.mark.parametrize("named", sorted(set(ACTS.values())))
def test_the_test_of_a_key_is_there(named: str) -> None:
    path, _, name = named.partition("::")
    assert name in functions(path), named


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
