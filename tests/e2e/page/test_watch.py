"""Watch: calm while nothing happens, an alarm with its scanner and date, and the masks to look at first."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from statistics import NormalDist, mean
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from locum.demo.service_process import free_port, running_service
from model_store.store import Store
from service import observation
from service.database import Assignment, Database, Shadow, ShadowAnswer, ShadowLabel
from service.observation import Answer, Observed, SeenLabel
from service.settings import Settings
from service.watch.watcher import look
from tests.e2e.page.conftest import opened_page, publish_retina
from tests.e2e.page.test_accessibility import assert_accessible

# A session of a service without authentication.
OPEN = {"actor": "anonymous", "authenticated": False, "hospitals": None, "expires_at": None, "csrf": None}
PER_DAY, DAYS = 20, 30
CHANGED = 40
GOLDEN = (math.sqrt(5) - 1) / 2


class Hospital:
    """`north`, of which the answers of two scanners by `retina` are stored at chosen times."""

    def __init__(self, client: httpx.Client, database: Database, digest: str) -> None:
        self.address = str(client.base_url)
        self.client = client
        self.database = database
        self.digest = digest
        self.stored = 0

    def store(
        self, times: Sequence[datetime], *scanners: str, factor: float = 1.0, software: str = "1"
    ) -> None:
        """Store an answer of each scanner at each time, with shifts of a log-normal law times `factor`."""
        answers = []
        for at in times:
            self.stored += 1
            # Evenly, without chance: a false alarm, of which there is one a year, would fail the tests.
            even = NormalDist().inv_cdf(self.stored * GOLDEN % 1)
            for scanner in scanners:
                number = f"{self.stored}-{scanner.replace(' ', '')}"
                seen = Observed(
                    *("retina", self.digest, "sha256:g", f"sha256:{number}", (64, 64)),
                    *(0.5, "float32", "CPU"),
                    labels=(
                        SeenLabel("disc", 0.9 + self.stored * math.sqrt(2) % 1 / 10, 1000),
                        SeenLabel("cup", 0.6 + self.stored * math.sqrt(3) % 1 / 10, 200),
                    ),
                    locum="1",
                    scanner=scanner,
                    acquisition={"software": software},
                    shift=factor * math.exp(0.3 * even),
                    shift_at="norms",
                )
                answers.append(Answer(seen, "north", "key:pacs", f"request-{number}", "http", at))
        # At once: the service's own watcher would begin with those of a part.
        with self.database.write() as session:
            for start in range(0, len(answers), 200):
                observation.append(session, answers[start : start + 200])
        look(self.database)


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospital]:
    root = tmp_path_factory.mktemp("watched")
    store = Store(root / "store")
    publish_retina(store)
    with running_service(root / "store", root / "state", free_port()) as client:
        client.put("/hospitals/north", json={"name": "North"}).raise_for_status()
        settings = Settings(store=root / "store", state_dir=root / "state")
        database = Database(settings.resolved_database_url)
        digest = store.open("retina").digest
        began = datetime.now(UTC) - timedelta(days=2 * DAYS)
        with database.write() as session:
            own = {"version": 1, "digest": digest, "actor": "ada", "reason": "test", "at": began}
            session.add(Assignment(hospital="north", model="retina", sequence=1, **own))
        yield Hospital(client, database, digest)
        database.dispose()


def days_before(today: datetime) -> list[datetime]:
    """The times of `PER_DAY` answers on each of the days before today."""
    midnight = today.replace(hour=0, minute=0, second=0, microsecond=0)
    return [
        midnight - timedelta(days=day) + timedelta(hours=8, minutes=20 * number)
        for day in range(DAYS, 0, -1)
        for number in range(PER_DAY)
    ]


def test_calm_then_an_alarm_that_a_person_answers_then_calm(browser: Any, hospital: Hospital) -> None:
    now = datetime.now(UTC)
    with opened_page(browser, hospital.address, expected=()) as page:
        page.goto(f"{hospital.address}/#/watch")
        page.get_by_text("Nothing is watched yet").wait_for()
        assert_accessible(page, "nothing watched")

        hospital.store(days_before(now), "CT 1", "CT 2")
        page.goto(f"{hospital.address}/?calm#/watch")
        strip = page.get_by_role("region", name="North, retina")
        strip.get_by_text("routine", exact=True).wait_for()
        page.get_by_text("1 model watched, and no alarm.").wait_for()
        second = strip.get_by_role("group", name="CT 2")
        assert second.locator(".watch-arrivals").inner_text() == "0 today, usually 20"
        second.get_by_role("img", name=re.compile("^shift, 150 answers from .*; from [01].")).wait_for()
        assert strip.get_by_text("One false alarm in 12 months: a change of one standard").count() == 1
        # No colour, and nothing that moves.
        greys = strip.evaluate(
            "each => [...each.querySelectorAll('svg *, .dot')].every((part) =>"
            " [getComputedStyle(part).stroke, getComputedStyle(part).borderColor].every((found) =>"
            " !found.startsWith('rgb') || Math.max(...found.match(/\\d+/g).slice(0, 3).map(Number))"
            " - Math.min(...found.match(/\\d+/g).slice(0, 3).map(Number)) < 32))"
        )
        assert greys
        assert page.evaluate("document.getAnimations().length") == 0
        assert strip.get_by_role("button", name="Answer").count() == 0
        assert_accessible(page, "calm")

        changed = [now - timedelta(seconds=CHANGED - number) for number in range(CHANGED)]
        hospital.store(changed, "CT 2", factor=3.0, software="2")
        page.goto(f"{hospital.address}/?alarm#/watch")
        page.get_by_text("1 of 1 model to investigate.").wait_for()
        strip.get_by_text("investigate", exact=True).wait_for()
        watch = hospital.client.get("/watch", params={"hospital": "north"}).json()["watches"][1]
        (told,) = watch["alarms"]
        since = datetime.fromisoformat(told["since"])
        # The last zero of the sum: no later than the change, and a few answers before it at most.
        assert timedelta(0) <= changed[0] - since < timedelta(days=2)
        assert f"investigate since {since:%-d %b %Y}" in " ".join(second.inner_text().split())
        assert "investigate" not in strip.get_by_role("group", name="CT 1").inner_text()
        second.get_by_text("the scanner's software: 1 → 2").wait_for()
        alarm = second.get_by_text(f"Shift is higher since {since:%-d %b %Y}")
        # By keyboard.
        alarm.focus()
        page.keyboard.press("Enter")
        details = hospital.client.get("/hospitals/north/watch/retina", params={"limit": 300}).json()
        deviant = next(each["deviant"] for each in details["events"] if each["id"] == told["id"])
        rows = second.get_by_role("table").get_by_role("row")
        assert rows.count() == 1 + len(deviant) == 7
        for row, point in zip(rows.all()[1:], deviant, strict=True):
            assert point["request"] in row.inner_text()
            assert f"{math.exp(point['values']['shift']):.2f}" in row.inner_text()
        assert_accessible(page, "alarm")

        with opened_page(browser, hospital.address, expected=()) as reader:
            reader.route("**/session", lambda route: route.fulfill(json={**OPEN, "roles": ["reader"]}))
            reader.goto(f"{hospital.address}/?reader#/watch")
            reader.get_by_text("An operator answers it.").wait_for()
            assert reader.get_by_role("button", name=re.compile("^Answer|^Set the watch")).count() == 0

        second.get_by_role("button", name="Answer").click()
        dialog = page.get_by_role("dialog", name="Answer the alarm")
        dialog.get_by_text("shift is higher since").wait_for()
        send = dialog.get_by_role("button", name="Answer the alarm")
        dialog.get_by_label("Reason").fill("a new tube")
        assert send.is_disabled()
        dialog.get_by_label("Your name").fill("ada")
        assert_accessible(page, "answer")
        send.click()
        strip.get_by_text("routine", exact=True).wait_for()
        second.get_by_text("It learns what is usual: 0 of 50 answers.").wait_for()
        strip.get_by_text("1 answered alarm").click()
        answered = strip.get_by_role("listitem").inner_text()
        assert "CT 2: shift is higher." in answered
        assert "ada" in answered
        assert "a new tube" in answered


def test_rule_of_the_watch_is_set_with_a_reason(browser: Any, hospital: Hospital) -> None:
    if hospital.stored == 0:
        hospital.store(days_before(datetime.now(UTC)), "CT 1")
    with opened_page(browser, hospital.address, expected=()) as page:
        page.goto(f"{hospital.address}/#/watch")
        page.get_by_role("button", name="Set the watch of North, retina").click()
        dialog = page.get_by_role("dialog", name="Set the watch")
        dialog.get_by_label("Months between false alarms").fill("24")
        dialog.get_by_label("While an alarm waits").select_option(label="Let the federation's model answer")
        dialog.get_by_label("Your name").fill("ada")
        dialog.get_by_label("Reason").fill("two alarms a year are too many")
        dialog.get_by_role("button", name="Set the watch").click()
        page.get_by_text("One false alarm in 24 months").wait_for()
        page.get_by_text("While an alarm waits, the federation's model answers.").wait_for()
    (rule, *_) = hospital.client.get("/watch").json()["watches"]
    assert (rule["months"], rule["stop"]) == (24, "global")


def test_work_list_has_the_least_sure_first_and_remembers_a_look(browser: Any, hospital: Hospital) -> None:
    if hospital.stored == 0:
        hospital.store(days_before(datetime.now(UTC)), "CT 1")
    query = {"model": "retina", "order": "review", "limit": "100"}
    observed = hospital.client.get("/hospitals/north/observations", params=query).json()["observations"]
    with opened_page(browser, hospital.address, expected=()) as page:
        page.goto(f"{hospital.address}/#/watch")
        listed = page.get_by_role("region", name="Masks to look at first")
        looking = page.get_by_role("button", name=re.compile("^Looked at"))
        rows = listed.get_by_role("row").filter(has=looking)
        rows.first.wait_for()
        requests = [row.get_by_role("cell").nth(4).inner_text() for row in rows.all()]
        assert requests == [each["request"] for each in observed[:10]]
        first = observed[0]
        least = min(first["review"], key=first["review"].__getitem__)
        words = " ".join(rows.first.inner_text().split())
        for said in (
            least,
            "the 1 % least sure",
            f"{first['labels'][least]['confidence']:.2f}",
            first["scanner"],
        ):
            assert said in words
        rows.first.get_by_role("button", name=re.compile("^Accept")).click()
        rows.first.get_by_text("Accepted by anonymous").wait_for()
        opens = rows.nth(1).get_by_role("link", name=re.compile("^Correct")).get_attribute("href")
        assert f"correct={observed[1]['request']}" in opens
        rows.first.locator(looking).click()
        listed.get_by_text("by anonymous", exact=True).wait_for()
        # It stands where it was until the list is read again: then it comes last.
        assert rows.count() == 9
        page.goto(f"{hospital.address}/?again#/watch")
        rows.first.wait_for()
        assert rows.first.get_by_role("cell").nth(4).inner_text() == observed[1]["request"]
        listed.get_by_role("button", name="Next").click()
        listed.get_by_text("11 to 20 of 100").wait_for()
    again = hospital.client.get("/hospitals/north/observations", params=query).json()["observations"]
    assert first["id"] not in [each["id"] for each in again]
    looked = [
        each
        for each in hospital.client.get("/hospitals/north/observations?limit=1000").json()["observations"]
        if each["looked_at"]
    ]
    assert [each["id"] for each in looked] == [first["id"]]


def test_answer_says_how_sure_it_is_among_the_hospital_s_own(browser: Any, hospital: Hospital) -> None:
    if hospital.stored == 0:
        hospital.store(days_before(datetime.now(UTC)), "CT 1")
    # All pixels just above the threshold of the disc and far below the cup's.
    pixels = np.full((32, 32), 40, np.uint8)
    pixels[8:24, 8:24] = 104
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    with opened_page(browser, hospital.address, expected=()) as page:
        page.goto(f"{hospital.address}/#/look?model=retina&hospital=north")
        page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
        page.set_input_files(
            "input[type=file]", {"name": "eye.png", "mimeType": "", "buffer": content.getvalue()}
        )
        page.get_by_role("button", name="Segment").click()
        rows = page.get_by_role("region", name="Answer").get_by_role("row")
        disc, cup = rows.filter(has_text="disc").first, rows.filter(has_text="cup").first
        # A disc of p = 1 / (1 + exp(-2)) has 2 p / (p + 1) = 0.937: of 0.9 to 1, 37 % are below.
        disc.get_by_text("Among the 50 % least sure of this hospital's answers; confidence 0.94").wait_for()
        assert "Surer than nine in ten of this hospital's answers; confidence 1.00" in cup.inner_text()


@pytest.mark.parametrize("size", [(390, 844), (1280, 800), (1920, 1080)], ids=lambda size: f"{size[0]}")
def test_view_fits_a_phone_a_laptop_and_a_wide_screen(
    browser: Any, hospital: Hospital, size: tuple[int, int]
) -> None:
    if hospital.stored == 0:
        hospital.store(days_before(datetime.now(UTC)), "CT 1")
    viewport = {"width": size[0], "height": size[1]}
    with opened_page(browser, hospital.address, expected=(), viewport=viewport) as page:
        page.goto(f"{hospital.address}/#/watch")
        page.get_by_role("region", name="North, retina").get_by_role("img").first.wait_for()
        page.get_by_role("region", name="Masks to look at first").get_by_role("table").wait_for()
        assert page.evaluate("document.querySelector('main').scrollWidth - innerWidth") <= 0


def test_version_that_answers_unseen_is_one_chart_beside_the_one_that_serves(
    browser: Any, hospital: Hospital
) -> None:
    if hospital.stored == 0:
        hospital.store(days_before(datetime.now(UTC)), "CT 1")
    began = datetime.now(UTC) - timedelta(days=9)
    with hospital.database.write() as session:
        own = {"hospital": "north", "model": "retina", "version": "sha256:2", "artefact": "retina@2"}
        made = Shadow(**own, every=5, rule=None, actor="ada", reason="newer", began=began)
        session.add(made)
        session.flush()
        for number in range(40):
            at = began + timedelta(hours=5 * number)
            answer = ShadowAnswer(
                shadow=made.id,
                request=f"unseen-{number}",
                at=at,
                served=hospital.digest,
                choice={},
                exact=True,
            )
            session.add(answer)
            session.flush()
            wave = math.sin(number / 4) / 20
            dice = (0.86 + wave, 0.9 + wave) if number % 3 == 0 else (None, None)
            for label, size in (("disc", 1000), ("cup", 200)):
                session.add(
                    ShadowLabel(
                        answer=answer.id,
                        label=label,
                        agreement=0.93 + wave,
                        served_voxels=size,
                        shadow_voxels=size + 10 * number % 40,
                        served_confidence=0.9 + wave,
                        shadow_confidence=0.92 + wave,
                        served_dice=dice[0],
                        shadow_dice=dice[1],
                    )
                )
    with opened_page(browser, hospital.address, expected=()) as page:
        page.goto(f"{hospital.address}/#/watch")
        chart = page.get_by_role("group", name="retina@2, unseen")
        chart.get_by_text(
            "On 14 answers that a person corrected or accepted, Dice changed by +4.0 points"
        ).wait_for()
        chart.get_by_role("button", name="cup").click()
        lanes = chart.get_by_role("img")
        assert lanes.count() == 4
        names = [each.get_attribute("aria-label") or "" for each in lanes.all()]
        rest = mean(math.sin(number / 4) / 20 for number in range(40))
        served, unseen = (f"{value + rest:.2f}" for value in (0.9, 0.92))
        assert names[0].startswith(f"cup: Agreement of the two, mean {0.93 + rest:.2f}, over 40 answers")
        assert names[2].startswith(f"cup: Confidence, mean {served}, unseen {unseen}, over 40 answers")
        assert names[3].startswith("cup: Dice with corrections, mean 0.8")
        # The line of the second version has a corner for each answer, and dots are the corrected ones.
        assert len((lanes.nth(1).locator(".unseen").get_attribute("points") or "").split()) == 40
        assert (lanes.nth(3).locator(".unseen").get_attribute("d") or "").count("M") == 14
        assert_accessible(page, "unseen")
