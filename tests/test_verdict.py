"""verdict.py against the paired differences of the pocket tables, and against sweeps of a law with a known effect.

Coverage and power of the pocket grid, 300 sweeps an effect, in 15 s:
python -m pytest tests/test_verdict.py -m study -n 0 -s
"""
import csv
import json
from functools import lru_cache

import numpy as np
import pytest

import fit_law as F
import law as W
import runs as S
from sweep import GRIDS
import verdict as V

BASE, TRICKS = F.ROOT / "results" / "pocket_runs.csv", F.ROOT / "results" / "trick_runs.csv"
NOISE = 0.018  # nats between seeds
LOWER = [6e11, 1.5e12, 3.8e12]


@lru_cache
def tables():
    return S.load_runs(BASE), S.load_runs(TRICKS)


def trick_runs(name):
    return S.select(tables()[1], tables()[1]["sweep"] == name)


def write_table(path, runs, **changes):
    names = [k for k in runs if k != "budget"]
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(names)
        writer.writerows(zip(*({**runs, **changes}[k] for k in names)))
    return path


# --- the pocket tables ---

@pytest.mark.parametrize("name, mean, error", [
    ("last_half", -0.089, 0.011), ("e_plus_h", -0.033, 0.007), ("hyperconnections", -0.003, 0.010),
    ("gate", 0.020, 0.008), ("no_injection", 0.099, 0.028), ("loss_on_every_pass", 0.102, 0.011)])
def test_differences_of_the_pairs(name, mean, error):
    pairs, n_alone = V.pair_runs(*map(joined, (tables()[0], trick_runs(name))), name)
    change = pairs["val_loss"] - pairs["without"]
    assert len(change) == 18 and n_alone == 0
    assert change.mean() == pytest.approx(mean, abs=6e-4)
    assert change.std(ddof=1) / 18 ** 0.5 == pytest.approx(error, abs=6e-4)


def joined(runs):
    """The runs with the budgets of the grid as their names, so that two tables agree."""
    grid = np.array(sorted(GRIDS["pocket"]["widths"]))
    nearest = np.abs(np.log(runs["flops"][:, None] / grid)).argmin(1)
    return runs | {"budget": grid[nearest]}


def test_seed_noise_is_that_of_the_page():
    noise, spare = V.seed_noise(tables()[0])
    assert (round(noise, 3), spare) == (0.018, 4)


def test_command_on_the_pocket_tables(cli, tmp_path):
    done = cli("verdict", BASE, TRICKS, f"--json={tmp_path / 'v.json'}")
    results = json.loads((tmp_path / "v.json").read_text())
    decided = {name: result["decided"] for name, result in results.items()}
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 + 5 * 6
    assert decided["last_half"] == "better"
    assert decided["loss_on_every_pass"] == decided["no_injection"] == "worse"
    assert decided["hyperconnections"] == "not decided"
    for result in results.values():
        low, high = result["multiplier_ci"]
        assert low < result["multiplier"] < high and (result["multiplier"] > 1) == (result["nats"] < 0)


# --- the page of tricks holds what its raw files say ---

PAGE = (F.ROOT / "results" / "tricks.md").read_text(encoding="utf-8")


def rows_of(name):
    with open(F.ROOT / "results" / name, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_table_of_tricks_is_the_scoreboard():
    _, section = PAGE.split("## All of them, ranked")
    section, _ = section.split("## What do the passes do?")
    _, _, *lines = [line for line in section.splitlines() if line.startswith("|")]         # below the head
    scores = rows_of("tricks.csv")
    assert len(lines) == len(scores)
    for line, row in zip(lines, scores):
        _, trick, _, saves, tokens, per_token, plain, against, pairs, _ = [cell.strip() for cell in line.split("|")]
        assert row["trick"] in trick, line
        assert saves == bold(saving(row, "multiplier"), row["decided"] != "not decided")
        bounds = [float(row[key]) / float(row["tokens"]) for key in ("multiplier", "multiplier_low", "multiplier_high")]
        text = "{:.2f} [{:.2f}, {:.2f}]".format(*bounds)
        assert (tokens, per_token) == (f"{float(row['tokens']):.2f}", bold(text, bounds[1] > 1 or bounds[2] < 1)), line
        assert plain == saving(row, "plain") or not row["plain"] and plain in ("the same model", "not run")
        assert against == saving(row, "against_plain")
        assert pairs.split(",")[0] == row["pairs"] and pairs.split()[1] == row["seeds"]


def bold(text, decided):
    return f"**{text}**" if decided else text


def saving(row, key):
    """What percent_text says of a multiplier of the scoreboard, as the page has it; "" if it is not known."""
    if not row[key]:
        return ""
    text = V.percent_text(float(row[key]), [float(row[f"{key}_{end}"]) for end in ("low", "high")])
    return text.replace(" of the compute", "").replace(" more compute", "")


def test_pages_count_the_tricks_that_save():
    scores = rows_of("tricks.csv")
    count = f"{sum(row['decided'] == 'better' for row in scores)} of {len(scores)}"
    for name in ("README.md", "results/README.md", "results/tricks.md"):
        assert count in (F.ROOT / name).read_text(encoding="utf-8"), (name, count)


def test_docstrings_say_what_the_scoreboard_says():
    for row in rows_of("tricks.csv"):
        file = F.ROOT / "tricks" / f"{row['trick']}.py"
        if file.is_file():
            words = " ".join(file.read_text(encoding="utf-8").split('"""')[1].split())
            assert f"Here ({row['pairs']} pairs of runs" in words and saving(row, "multiplier") in words, file.name


def test_table_of_passes_is_that_of_its_file():
    runs = {}
    for row in rows_of("passes.csv"):
        assert float(row["low"]) <= float(row["lost"]) <= float(row["high"])
        runs.setdefault(row["run"], {})[int(row["passes"])] = row
    for name, rows in runs.items():
        lost = [f"{float(rows[k]['lost']):+.3f}" for k in (1, 2, 3)]
        assert f"| {name} | {float(rows[4]['nats']):.3f} | {' | '.join(lost)} |" in PAGE


def test_the_older_grid_on_the_page(cli, tmp_path):
    """Its table, and what it says without the lowest budget."""
    _, section = PAGE.split("## The older grid")
    for budgets, wanted in ([], 6), (["--budgets", "1.5e12", "3.8e12"], 6):
        file = tmp_path / "v.json"
        assert cli("verdict", BASE, TRICKS, f"--json={file}", *budgets).returncode == 0
        found = 0
        for name, result in json.loads(file.read_text()).items():
            low, high = result["multiplier_ci"]
            found += f"{result['multiplier']:.2f} [{low:.2f}, {high:.2f}]" in section
        assert found >= wanted


def test_experts_as_a_trick_on_the_page():
    """The experts of moe.md paired with their dense models, as if no column told them apart."""
    runs = S.load_runs(F.ROOT / "results" / "moe_runs.csv")
    with_experts = runs["n_expert"] == 8
    dense, sparse = S.select(runs, ~with_experts), S.select(runs, with_experts)
    sparse["n_expert"] = np.zeros_like(sparse["n_expert"])
    result = V.judge(dense, sparse, "experts")
    assert result["pairs"] == 12 and result["decided"] == "not decided"
    for key in ("multiplier", "plain"):
        text = V.percent_text(result[key], result[f"{key}_ci"]).replace(" of the compute", "")
        assert text in PAGE.split("## Experts, on their own grid")[1], text
    assert f"{result['share']:.2f} {V.bracket(result['share_ci'], '.2f')}" in PAGE.split("## Experts, on their own grid")[1]


def test_table_of_rates_on_the_page():
    losses = {}
    for row in rows_of("rate_runs.csv"):
        losses.setdefault(row["sweep"], []).append(f"{float(row['val_loss']):.3f}")
    for rate in ("0.01", "0.04"):
        without, scaled = losses[f"rate_{rate}"], losses[f"residual_scale_rate_{rate}"]
        assert f"| {rate} | {' / '.join(without)} | {' / '.join(scaled)} |" in PAGE


def test_too_few_pairs_no_pair_and_other_flops(cli, tmp_path):
    runs = trick_runs("gate")
    few = S.select(runs, runs["n_embd"] == 24)
    done = cli("verdict", BASE, write_table(tmp_path / "few.csv", few))
    assert done.returncode == 0 and "gate: no verdict, 4 pairs" in done.stdout
    seeds = np.where(runs["n_embd"] == 24, 7, runs["seed"])
    done = cli("verdict", BASE, write_table(tmp_path / "alone.csv", runs, seed=seeds))
    assert done.returncode == 0 and "14 pairs" in done.stdout and "4 runs without a pair left out" in done.stdout
    flops = np.where(runs["n_embd"] == 24, 1.02, 1) * runs["flops"]
    done = cli("verdict", BASE, write_table(tmp_path / "flops.csv", runs, flops=flops))
    assert done.returncode == 2 and "n_embd 24" in done.stderr and done.stderr.count("\n") == 1
    done = cli("verdict", BASE, TRICKS, "--budgets", "7e12")
    assert done.returncode == 2 and "--budgets=7e+12" in done.stderr


# --- sweeps from a law ---

@lru_cache
def truth():
    """The pocket baseline with the losses of its fitted law and without noise, and the law."""
    base = joined(tables()[0])
    fit = W.fit_law(base)
    return base | {"val_loss": W.predict(fit["theta"], fit["x"])[0]}, fit


@lru_cache
def optimum(compute, r):
    """The law's loss of the best width at this compute."""
    base, fit = truth()
    runs = S.select(base, base["n_loop"] == r)
    log_n = np.log(runs["n_once"] + runs["n_rec"])
    per_token = np.polyfit(log_n, np.log(runs["flops"] / runs["tokens"]), 2)
    once = np.polyfit(log_n, np.log(runs["n_once"]), 2)
    grid = np.linspace(log_n.min() - 1, log_n.max() + 1, 2000)
    n_once = np.exp(np.polyval(once, grid))
    n_rec = np.exp(grid) - n_once
    tokens = compute / np.exp(np.polyval(per_token, grid))
    return W.predict_at(fit, n_once, n_rec, tokens, r).min()


def gain(budget, r, factor):
    """Nats by which the law's optimum loss falls when the compute of a budget grows by this factor."""
    return optimum(budget, r) - optimum(factor * budget, r)


def make_sweep(seed, factor, scatter=0.0, loops=(2, 4), trick_factor=None, seeds=1, grid="trick"):
    """A noisy baseline, and the runs of a trick that is worth this factor of compute.

    scatter: sd in nats of what the trick does at each (budget, r) cell besides. seeds: runs of each cell and width. grid:
    of sweep.py.
    """
    rng = np.random.default_rng(seed)
    base, _ = truth()
    first = S.select(base, base["seed"] == 42)
    copies = [base] + [first | {"seed": first["seed"] + 100 * k} for k in range(1, seeds)]
    base = {k: np.concatenate([copy[k] for copy in copies]) for k in base}
    widths = GRIDS[grid]["widths"]
    in_grid = [d in widths.get(b, []) and r in loops for b, d, r in zip(base["budget"], base["n_embd"], base["n_loop"])]
    trick = S.select(base, np.array(in_grid) & (base["seed"] % 100 == 42))
    factors = {r: (trick_factor or {}).get(r, factor) for r in loops}
    saved = [gain(b, r, factors[r]) if factors[r] != 1 else 0 for b, r in zip(trick["budget"], trick["n_loop"])]
    cell = W.label_groups(trick, "budget", "n_loop")
    luck = scatter * rng.standard_normal(cell.max() + 1)[cell]
    trick = trick | {"val_loss": trick["val_loss"] - saved + luck + NOISE * rng.standard_normal(len(cell))}
    base = base | {"val_loss": base["val_loss"] + NOISE * rng.standard_normal(len(base["val_loss"]))}
    return base, trick


def study(n, factor, **options):
    """Shares of n sweeps whose interval holds the truth and whose verdict is `better`; the mean multiplier, and half
    the mean width of its interval."""
    inside, better, multipliers, widths = 0, 0, [], []
    for seed in range(n):
        result = V.judge(*make_sweep(seed, factor, **options), "simulated")
        low, high = result["multiplier_ci"]
        inside += low <= factor <= high
        better += result["decided"] == "better"
        multipliers.append(result["multiplier"])
        widths.append(high - low)
    return inside / n, better / n, np.mean(multipliers), np.mean(widths) / 2


def test_grid_of_the_simulation_is_that_of_the_tricks():
    for grid, seeds, n in (("trick", 1, 18), ("try", 2, 20)):
        base, trick = make_sweep(0, 1, seeds=seeds, grid=grid)
        pairs, _ = V.pair_runs(base, trick, "simulated")
        assert len(pairs["flops"]) == n


def judge_noise_free(saved_nats):
    """The verdict on a trick that lowers the law's loss by saved_nats(budget, r), without noise."""
    _, trick = make_sweep(0, 1)
    exact = truth()[0]
    saved = np.array([saved_nats(b, r) for b, r in zip(trick["budget"], trick["n_loop"])])
    rows = {key: loss for *key, loss in zip(*(exact[k] for k in V.PAIR), exact["val_loss"]) for key in [tuple(key)]}
    without = np.array([rows[key] for key in zip(*(trick[k] for k in V.PAIR))])
    return V.judge(exact, trick | {"val_loss": without - saved}, "simulated")


def test_noise_free_effect_comes_back():
    result = judge_noise_free(lambda budget, r: gain(budget, r, 1.3))
    assert result["multiplier"] == pytest.approx(1.3, abs=0.04)


def test_optimum_of_a_surface_is_its_lowest_point():
    """Against a fine grid of y, with a slope in y that is neither small nor like the mixed one."""
    surface = np.array([3, -0.3, 0.02, 0.07, 0.15, -0.05])
    constant, slope, bend = V.minimise_over_n(surface)
    y = np.linspace(-3, 3, 60_001)
    for x in (-1, 0, 1.5):
        lowest = (np.stack([y ** 0, x + 0 * y, x * x + 0 * y, y, y ** 2, x * y], axis=1) @ surface).min()
        assert constant + slope * x + bend * x ** 2 == pytest.approx(lowest, abs=1e-7)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_noise_free_comparison_with_the_plain_model_comes_back(factor):
    """A trick that brings the loop to the loss of a plain model with this factor of its compute."""
    result = judge_noise_free(lambda budget, r: optimum(budget, r) - optimum(factor * budget, 1))
    assert result["against_plain"] == pytest.approx(factor, abs=0.04)


def test_a_trick_that_does_nothing_is_covered():
    inside, better, *_ = study(100, 1.0)
    assert 0.90 <= inside <= 0.99 and better <= 0.07


def test_share_of_the_loop():
    """A trick that helps r = 1 as much has the share 1; one for the loop only has its own multiplier."""
    for plain, share in ((1.5, 1.0), (1.0, 1.5)):
        result = V.judge(*make_sweep(1, 1.5, loops=(1, 2, 4), trick_factor={1: plain}), "simulated")
        low, high = result["share_ci"]
        assert low < share < high and result["share"] == pytest.approx(share, abs=0.2)


def test_the_baseline_against_itself():
    """A seed of the baseline taken for a trick and paired with another: what results/tricks.md prints of it."""
    base, curve = S.load_runs(F.ROOT / "results" / "baseline_runs.csv"), joined(tables()[0])
    base = joined(base)
    page = (F.ROOT / "results" / "tricks.md").read_text(encoding="utf-8")
    for first, second in ((42, 43), (42, 44), (43, 44)):
        without = S.select(base, base["seed"] == first)
        other = S.select(base, base["seed"] == second)
        result = V.judge(without, other | {"seed": without["seed"]}, "nothing", curve)
        low, high = result["multiplier_ci"]
        assert f"| seed {second} against {first} | {result['multiplier']:.2f} [{low:.2f}, {high:.2f}]" in page
    noise, spare = V.seed_noise(base)
    assert f"differs by {noise:.3f} nats (sd, {spare} degrees" in page


@pytest.mark.study
def test_coverage_and_power_study():
    print("\nnoise 0.018 nats, 300 sweeps a line: grid, true multiplier, scatter of cells in nats, pairs, covered, "
          "called better, mean multiplier, half-width")
    lines = [("trick", 1.0, 0, 1), ("trick", 1 / 0.95, 0, 1), ("trick", 1.1, 0, 1), ("trick", 1.3, 0, 1),
             ("trick", 1.0, 0.02, 1), ("trick", 1 / 0.95, 0.02, 1), ("trick", 1.1, 0.02, 1)]
    for seeds in (2, 3):                         # the grid of `sweep.py try`
        for scatter in (0, 0.01, 0.02):
            lines += [("try", 1.0, scatter, seeds), ("try", 1 / 0.95, scatter, seeds), ("try", 1.1, scatter, seeds)]
    for grid, factor, scatter, seeds in lines:
        inside, better, mean, half = study(300, factor, scatter=scatter, seeds=seeds, grid=grid)
        pairs = seeds * (18 if grid == "trick" else 10)
        print(f"{grid:5s} {factor:.3f}  {scatter:.2f}  {pairs}  {inside:.1%}  {better:.1%}  {mean:.3f}  {half:.3f}",
              flush=True)
        if factor == 1:
            assert 0.93 <= inside <= 0.97
