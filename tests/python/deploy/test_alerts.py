# SPDX-License-Identifier: Apache-2.0
"""Prometheus' rules and Grafana's dashboard: valid, tested, of metrics that there are, and each alert with a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from metrics_contract import METRICS
from server_process import ROOT

yaml = pytest.importorskip("yaml")

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/dashboards/ema-server.json"
# What Prometheus adds.
LABELS = {"instance", "job", "le", "alertname", "alertstate"}


def rules() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [note["expr"] for note in board["annotations"]["list"]]
    # With a word for each of Grafana's variables, it is PromQL.
    return [re.sub(r"\$__\w+", "5m", asks).replace("$", "") for asks in asked]


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + dashboard_expressions()


def promtool(*arguments: object) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: deploy/setup.sh --all installs it (Debian package prometheus)")
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.framework
def test_promtool_accepts_rules_and_configuration():
    assert f"{len(rules())} rules found" in promtool("check", "rules", PROMETHEUS / "alerts.yml")
    for name in ("prometheus.yml", "group.yml"):
        promtool("check", "config", PROMETHEUS / name)


@pytest.mark.framework
def test_alerts_fire_when_they_should_and_at_no_other_time():
    promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


@pytest.mark.framework
def test_the_dashboards_queries_are_promql(tmp_path):
    queries = [
        {"record": f"query{number}", "expr": expression}
        for number, expression in enumerate(dashboard_expressions())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": queries}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path)


def test_every_metric_and_label_that_is_asked_for_exists():
    used = set()
    for expression in expressions():
        names = set(re.findall(r"\b(?:ema|process)_\w+", expression))
        # Of what stands in quotes nothing is a name.
        bare = re.sub(r'"[^"]*"', "", expression)
        assert names <= METRICS.keys(), expression
        labels = {
            label
            for matchers in re.findall(r"\{([^}]*)\}", bare)
            for label in re.findall(r"(\w+)\s*[=!]", matchers)
        }
        for names_of in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", bare):
            labels |= set(re.findall(r"\w+", names_of))
        known = LABELS.union(*(METRICS[name] for name in names))
        assert labels <= known, expression
        used |= names
    forgotten = {name for name in METRICS if not name.endswith("_count")} - used
    # The sums of durations, whose quantiles are shown, the version's number beside its step, and limits
    # of what comes and goes within a scrape.
    assert {name for name in forgotten if not name.endswith(("_sum", "_bucket"))} == {
        "ema_model_version",
        "ema_sessions_limit",
    }


def test_every_alert_has_a_test_and_a_runbook():
    runbooks = (PROMETHEUS / "runbooks.md").read_text()
    tests = (PROMETHEUS / "alerts_test.yml").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", runbooks, re.MULTILINE | re.DOTALL))
    alerts = {rule["alert"]: rule for rule in rules()}
    assert sections.keys() == alerts.keys()
    for name, rule in alerts.items():
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / file == PROMETHEUS / "runbooks.md" and anchor == name.lower()
        assert rule["labels"]["severity"] in ("page", "ticket")
        page = (
            runbooks.index("## Alerts that page")
            < runbooks.index(f"### {name}\n")
            < runbooks.index("## Alerts that open a ticket")
        )
        assert page == (rule["labels"]["severity"] == "page"), name
        for part in ("**What it means.**", "**What to check.**", "**What to do.**"):
            assert part in sections[name], name
        assert f'alertname="{name}"' in tests


def test_the_dashboard_fits_together():
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(board))) <= variables
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"] and (panel["type"] == "row" or panel["description"])
    provider = ROOT / "deploy/grafana/provisioning/dashboards/ema.yaml"
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    folder = yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in compose["services"]["grafana"]["volumes"]
