"""The mission: what users were promised, a test for each row of the list. It stands here or, where
another file shows the row in full, SHOWN names it.
"""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
import train_grpo
import train_gspo
import train_ppo
import train_sft
from conftest import BYTES, ROOT, TINY, Place, add_noise, blocks, refusal, small_network

SMALL = dict(model_dim=32, num_heads=2, attn_window=8, mlp_mult=2.0, train_seq_len=32)
IDS = torch.randint(2, 20, (2, 17), generator=torch.Generator().manual_seed(0))
# Row -> its tests, as file.test without "test_".
SHOWN = {
    "Parameter Golf's commands as pasted": "settings.values_and_the_settings_of_others_are_accepted",
    "schedules that fire": "schedule.every_phase_fires_and_the_rate_reaches_its_floor",
    "impossible phases": "schedule.impossible_plans_are_errors",
    "averages": "schedule.ema_and_swa_closed_forms",
    "phases under any clock": "smoke.every_phase_fires_under_a_clock_that_cuts_the_run",
    "optimizers in whole runs": "smoke.every_choice_trains_and_packs",
    "the same optimizers in every script": "house.a_setting_is_the_same_line_in_every_script",
    "frequency and phase of bio units": "family.mlps_against_formulas",
    "checkpointing of activations": "family.gradients_are_finite_differences_with_and_without_checkpointing",
    "mixtures": "data.open_data_of_a_mixture",
    "sharded loading": "data.token_stream_is_the_concatenation_read_round",
    "ids of SentencePiece": "data.byte_tables_are_the_decoded_bytes",
    "ids of tiktoken": "data.any_encoding_comes_from_its_rank_file",
    "ids of bytes": "data.byte_tokenizer_layout",
    "GPTQ": "gptq.gptq_is_the_textbook_column_by_column",
    "byte gate": "smoke.too_large_an_artifact_fails_and_is_saved",
    "checked byte counts": "data.a_wrong_count_of_validation_bytes_is_refused",
    "sliding and stateful scores": "evaluation.stateful_score_is_that_of_a_slow_loop_over_documents",
    "several ranks": "smoke.ranks_and_micro_batches_do_not_change_the_losses",
    "several nodes": "lasting.two_nodes_meet_by_the_command_of_the_guide",
    "resume to the byte": "lasting.a_signal_ends_the_step_saves_and_leaves",
    "resume on other ranks": "lasting.one_rank_two_ranks_one_rank",
    "replay": "lasting.replays_of_a_wallclock_run_are_the_same_to_the_byte",
    "stacks of hung ranks": "lasting.a_hang_prints_the_stacks_and_the_run_goes_on",
    "masked steps": "lasting.bad_steps_are_skipped_and_counted",
    "records of three seeds": "record.a_new_record_is_what_the_runs_left",
    "trackers": "tracker.the_numbers_of_the_log_are_mirrored",
    "BitDelta, in a program": "delta.bitdelta_against_numpy",
    "DeltaQuant": "delta.codes_of_deltaquant",
    "deltas as commands": "delta.what_the_commands_print_and_write",
    "LoRA": "lora.an_adapted_network_is_that_of_the_dense_sums",
    "PEFT": "models.adapters_go_out_merged_or_alone",
    "rows and masks": "sft.ids_and_targets_by_hand",
    "kinds of rows": "chat.files_of_every_kind_give_the_same_rows",
    "packing": "sft.packed_rows_are_as_they_are_alone",
    "distillation": "sft.distilled_losses_row_by_row",
    "reward models": "dpo.bradley_terry_with_margin_and_centering",
    "DPO, IPO, cDPO, robust DPO": "dpo.losses_are_the_values_worked_by_hand",
    "PPO": "ppo.the_loss_is_its_closed_form",
    "GAE": "ppo.advantages_are_the_double_sum",
    "train_step(queries, reward_function)": "objective.a_reward_of_train_step_gets_its_arguments_by_their_names",
    "GRPO and GSPO, asymmetric clips": "objective.objectives_are_their_closed_forms",
    "dynamic sampling": "objective.groups_of_one_reward_are_replaced",
    "math rewards": "tasks.gsm8k_reads_the_number_where_others_look_for_it",
    "logic rewards": "puzzles.a_zebra_puzzle_has_one_solution_which_is_the_answer",
    "environments": "environment.tokens_of_the_environment_are_context_and_log_probabilities_are_exact",
    "FSDP": "sharding.two_ranks_learn_what_one_does_and_hold_half",
    "shards on other ranks": "sharding.a_run_goes_on_with_other_numbers_of_ranks",
    "win rate, judges": "scores.win_rate_by_a_checker_or_a_reward_model",
    "preference accuracy": "scores.preferences_by_hand",
    "quality": "scores.quality_by_hand",
    "pass@k": "scores.pass_at_k_by_enumeration",
    "lm-evaluation-harness": "harness.published_tasks",
    "Llama, Qwen2, Qwen3, Qwen3.5": "models.logits_and_gradients_are_those_of_transformers",
    "safetensors": "models.exports_are_the_model",
    "GGUF": "gguf.a_file_comes_back_as_it_went_out",
    "llama.cpp": "gguf.llama_cpp_computes_the_same",
    "other layouts": "remote.logits_and_greedy_texts",
    "chat": "chat.a_chat_keeps_its_history_until_it_is_reset",
}


@pytest.mark.parametrize("row", SHOWN)
def test_a_row_is_shown_by_a_test(row):
    name, _, test = SHOWN[row].partition(".")
    path = ROOT / ("test_smoke.py" if name == "smoke" else f"tests/test_{name}.py")
    assert f"\ndef test_{test}(" in path.read_text(encoding="utf-8")


def network(**changes):
    """Return a network of train_gpt.py by settings, random in every weight."""
    torch.manual_seed(0)
    settings = T.Settings(**{**SMALL, "layer_pattern": "g s a", **changes})
    net = T.GPT(T.model_config(settings, 20, 1))
    add_noise(net, 0.1)
    return net


def pretraining_settings(words):
    """Return the settings of train_gpt.py for `NAME=value …`, with its presets."""
    presets = {"ARCH_MODE": T.ARCH_PRESETS, "OPTIMIZER": T.OPTIMIZER_PRESETS}
    given = dict(word.split("=") for word in words.split())
    return T.load_settings(T.Settings, given, presets=presets)


def nats(net):
    return net(IDS[:, :-1], IDS[:, 1:])


def moved(net, change):
    """Return how far a change of the ids (1, 17) moves what the last one predicts."""
    before = net(IDS[:1, :-1], IDS[:1, 1:]).flatten()[-1]
    ids = IDS[:1].clone()
    change(ids[0])
    return abs(net(ids[:, :-1], ids[:, 1:]).flatten()[-1] - before).item()


def change_first(ids):
    ids[0] = 5 if ids[0] != 5 else 6


def swap_two(ids):
    ids[[3, 6]] = ids[[6, 3]]


# ---------------------------------------------------------------------------- pretraining: networks
@torch.no_grad()
def test_layers_are_gated_deltanet_windows_full_attention_and_shared_ones():
    assert moved(network(layer_pattern="s"), change_first) == 0  # behind the window of 8
    assert all(moved(network(layer_pattern=kind), change_first) > 1e-6 for kind in ("a", "g"))
    counts = {}
    for pattern in ("g a", "g a a", "g a1 a1", "g A1 A1"):
        params = network(layer_pattern=pattern).parameters()
        counts[pattern] = sum(param.numel() for param in params if param.ndim > 1)
    assert counts["g a a"] > counts["g a1 a1"] > counts["g A1 A1"] == counts["g a"]


def test_one_bio_unit_learns_xor():
    torch.manual_seed(0)
    unit = T.MLP(T.GPTConfig(2, 0, "a", "rms", model_dim=2, mlp="bio", mlp_hidden=1))
    inputs = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    xor = torch.tensor([0.0, 1.0, 1.0, 0.0])
    optimizer = torch.optim.Adam(unit.parameters(), lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        (unit(inputs)[:, 0] - xor).square().mean().backward()
        optimizer.step()
    assert (unit(inputs)[:, 0] - xor).abs().max() < 0.05


@torch.no_grad()
def test_norms_by_layer_and_kinds_of_positions():
    norms = [network(norm=norm) for norm in ("rms", "layer", "layer rms rms")]
    assert len({round(nats(net).mean().item(), 6) for net in norms}) == 3
    for changes in (dict(), dict(rope_dims=4), dict(positions="learned")):
        assert moved(network(layer_pattern="a", **changes), swap_two) > 1e-6
    assert moved(network(layer_pattern="a", positions="none"), swap_two) < 1e-5


# ------------------------------------------------------------------------ pretraining: optimization
@pytest.mark.parametrize("mode", ["1", "reduce-overhead", "max-autotune"])
def test_networks_are_compiled_whole_by_a_mode(mode, monkeypatch):
    settings = T.load_settings(T.Settings, {"COMPILE": mode})
    monkeypatch.setattr(T.torch, "compile", lambda net, **words: words)
    network = SimpleNamespace(embed=torch.zeros(1))
    words = T.compile_model(network, settings)
    expected = {"dynamic": False, "fullgraph": True, "mode": "default" if mode == "1" else mode}
    assert words == expected
    cpu = torch.device("cpu")
    T.check_compiler(settings.compile, cpu)
    monkeypatch.setenv("CXX", "no-such-compiler")
    given = (settings.compile, cpu)
    refusal(T.UserError, f"^COMPILE={mode}: .*no-such-compiler", T.check_compiler, *given)
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(T.sysconfig, "get_path", lambda *names: "/nowhere")
    refusal(T.UserError, f"^COMPILE={mode}: .*Python.h", T.check_compiler, *given)
    T.check_compiler(settings.compile, torch.device("meta"))  # not on a CPU
    T.check_compiler(False, cpu)


# Recipe of the WiggleGPT guide -> optimizer, positions, schedule.
RECIPES = {
    "balanced": "adamw learned linear",
    "best_loss": "lion learned wsd",
    "max_speed": "lion rope linear",
    "low_memory": "adamw8bit rope linear",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_of_the_wigglegpt_guide(recipe):
    found = pretraining_settings(f"CONFIG={ROOT}/configs/wiggle_{recipe}.env")
    chosen = f"{found.optimizer} {found.positions} {found.lr_schedule}"
    assert (found.mlp, chosen) == ("bio_soft", RECIPES[recipe])
    assert found.activation_checkpointing == (recipe == "low_memory")


# -------------------------------------------------------------------------- pretraining: whole runs
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    tiny = dict(TINY, ITERATIONS=12, MLP="bio_soft")
    return Place(tmp_path_factory.mktemp("mission"), tiny_data, tiny)


@pytest.fixture(scope="module")
def first(place):
    place.run("first", VAL_LOSS_EVERY=4, EVAL_STRIDE=16, EVAL_STATEFUL=1)
    return place.result("first")


def test_a_run_packs_int6_by_rans_and_scores_the_file(place, first):
    _, tensors, _ = T.read_artifact(place.of("first") / "model.upar")
    assert all(len(w.unique()) <= 63 for name, w in tensors.items() if name.endswith("w_up"))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    assert len(place.artifact("first")) == first["artifact_bytes"] < numbers
    assert first["val_bpb"] != first["before_quantization"]["val_bpb"]
    for name in ("val_bpb_sliding", "val_bpb_stateful"):
        assert 0.8 < first[name] / first["val_bpb"] < 1.2


def test_a_bio_run_tracks_its_events(place, first):
    """In result.json, and in the log at both validations and at the end."""
    shares = first["event_shares"]
    assert len(shares) == 3 and all(0 < share <= 1 for share in shares)
    lines = re.findall(r"^events: share of units by layer (.*)", place.log("first"), re.M)
    assert len(lines) == 3 and lines[-1] == " ".join(f"{share:.4f}" for share in shares)


def test_a_run_ends_at_its_target(place):
    place.run("target", ITERATIONS=30, VAL_LOSS_EVERY=5, TARGET_VAL_LOSS=5.9)
    result = place.result("target")
    assert result["steps"] in (5, 10) and result["train_seconds"] > 0
    assert "qat" not in result["phases"]  # and no error, which a replay must repeat
    place.run("target again", **{**place.unset, "REPLAY": place.of("target")})
    place.same("target", "target again")
    again = place.result("target again")
    assert (again["ended"], again["target_steps"]) == ("target", result["steps"])


def test_a_memory_snapshot_needs_cuda(place):
    assert "MEMORY_SNAPSHOT" in place.refused("snapshot", MEMORY_SNAPSHOT=1)


# ---------------------------------------------------------------------- programs, adapters, documents
@pytest.mark.parametrize(
    "module", (train_ppo, train_grpo, train_gspo), ids=lambda module: module.__name__
)
def test_trainers_in_a_program(module):
    """As in the two seeds."""
    name = module.__name__.removeprefix("train_").upper()
    config, trainer = (getattr(module, f"{name}{kind}") for kind in ("Config", "Trainer"))
    shape = dict(max_new_tokens=3, group_size=4, iterations=1, prompts_per_step=2, mini_batches=1)
    shape |= dict(left_clip_range=0.002, right_clip_range=0.003)

    def reward(queries, texts):
        return [float(sum(map(ord, text)) % 7) for text in texts]

    given = dict(model=small_network(), ref_model=small_network(1), tokenizer=BYTES)
    own = trainer(**given, args=config(**shape, kl_beta=0.1), train_dataset=["a", "bc"])
    assert len(own.train(reward)) == 1


def test_frozen_weights_stay_as_they_are():
    """setup_lora_adapter and freeze_model, as in the seeds."""
    net = small_network()
    count = sum(param.numel() for param in net.parameters())
    assert train_sft.setup_lora_adapter(net, rank=8, alpha=16) is net
    assert train_sft.freeze_model(net, trainable_layers=["lora"]) is net
    trained = [param for param in net.parameters() if param.requires_grad]
    added = sum(param.numel() for param in trained)
    assert 0 < added == sum(param.numel() for param in net.parameters()) - count
    train_sft.freeze_model(net, trainable_layers="lora")  # one word, not letters
    assert sum(param.numel() for param in net.parameters() if param.requires_grad) == added
    refusal(train_sft.UserError, "lorra", train_sft.freeze_model, small_network(), ["lorra"])


GUIDES = sorted(path.name for path in ROOT.glob("docs/*.md"))


@pytest.mark.parametrize("guide", GUIDES)
def test_settings_in_the_commands_of_guides_are_settings(guide):
    """Of `NAME=value … python train_x.py NAME=value`; a name that is wrong would be an error."""
    for line in "".join(blocks(guide, "bash")).replace("\\\n", " ").splitlines():
        script, *others = re.findall(r"(?<=\s)(train_\w+|sample)\.py\b", line) or ["", ""]
        if not others and "$" not in line and not line.startswith("for "):
            command = line.partition(" #")[0]
            given = dict(re.findall(r"(?:^|\s)([A-Z_0-9]+)=('[^']*'|\"[^\"]*\"|\S*)", command))
            given = {name: value.strip("'\"") for name, value in given.items()}
            config = given.pop("CONFIG", "") or "".join(re.findall(r"\S+\.env", command))
            assert not config or config.startswith("my") or (ROOT / config).exists()
            for name in ("RESUME", "SHARD"):
                given.pop(name, None)
            module = importlib.import_module(script)
            module.load_settings(module.Settings, given)
