"""Admission: places are taken at once and given back once, and a refusal takes none."""

from __future__ import annotations

import asyncio

import pytest

from quire.server import api_admission as places
from quire.server.api_admission import ApiAdmission
from quire.server.api_errors import ApiError
from quire.server.api_keys import ANYBODY, ApiTenant
from quire.server.metrics import Metrics

ANN, BOB = ApiTenant("ann", max_requests=2), ApiTenant("bob", requests_per_minute=3)


@pytest.fixture
def admission() -> ApiAdmission:
    return ApiAdmission(4, Metrics("m"))


def test_places_are_taken_before_anything_has_begun(admission: ApiAdmission) -> None:
    async def request() -> None:
        admitted = admission.admit(ApiTenant("any"), 1)
        await asyncio.sleep(0)  # others come
        admitted.release()

    async def all_at_once() -> list[object]:
        return await asyncio.gather(*[request() for _ in range(9)], return_exceptions=True)

    refused = [error for error in asyncio.run(all_at_once()) if error is not None]
    assert len(refused) == 5
    assert all(isinstance(error, ApiError) and error.status == 429 for error in refused)
    assert admission.num_open == 0


def test_places_are_left_prompt_by_prompt_or_together_and_never_twice(admission: ApiAdmission) -> None:
    admitted = admission.admit(ANN, 2)
    leave, other = admitted.release_of_one_prompt(), admitted.release_of_one_prompt()
    leave()
    leave()
    assert admission.num_open == 1
    admitted.release()
    assert admission.num_open == 0
    again = admission.admit(ANN, 2)  # all of them are there again
    other()  # a request whose wait was cancelled may end after its places were left
    assert admission.num_open == 2
    again.release()


@pytest.mark.parametrize(
    ("tenant", "num_requests", "code", "wait_s"),
    [(ApiTenant("any"), 4, "queue_full", 1), (ANN, 2, "tenant_limit", 1), (BOB, 3, "rate_limit", 60)],
)
def test_a_refusal_says_why_and_takes_nothing(
    admission: ApiAdmission, tenant: ApiTenant, num_requests: int, code: str, wait_s: int
) -> None:
    admission.admit(tenant, 1)
    with pytest.raises(ApiError) as refused:
        admission.admit(tenant, num_requests)
    assert (refused.value.status, refused.value.code) == (429, code)
    assert abs((refused.value.retry_after_s or 0) - wait_s) <= 1
    assert admission.num_open == 1
    admission.admit(tenant, 1)


def test_what_is_withdrawn_counts_in_no_minute(admission: ApiAdmission) -> None:
    for _ in range(5):
        admission.admit(BOB, 2).withdraw()
    assert admission.num_open == 0
    admission.admit(BOB, 3)
    assert admission.num_open == 3


def test_each_prompt_counts_for_all_of_its_answers(admission: ApiAdmission) -> None:
    admitted = admission.admit(ApiTenant("any"), 2, 2)
    assert admission.num_open == 4
    with pytest.raises(ApiError) as refused:
        admission.admit(ApiTenant("any"), 1)
    assert refused.value.code == "queue_full"
    admitted.release_of_one_prompt()()
    assert admission.num_open == 2
    admitted.release()
    assert admission.num_open == 0
    admission.admit(BOB, 1, 3).withdraw()
    admission.admit(BOB, 1, 3)
    with pytest.raises(ApiError) as refused:
        admission.admit(BOB, 1)
    assert refused.value.code == "rate_limit"


@pytest.mark.parametrize(
    ("tenant", "num_prompts", "n"), [(ApiTenant("any"), 1, 5), (ANN, 1, 3), (ANN, 3, 1), (BOB, 2, 2)]
)
def test_what_can_never_be_admitted_is_wrong_and_not_early(
    admission: ApiAdmission, tenant: ApiTenant, num_prompts: int, n: int
) -> None:
    with pytest.raises(ApiError) as refused:
        admission.admit(tenant, num_prompts, n)
    assert (refused.value.status, refused.value.code) == (400, "too_many_answers")
    assert admission.num_open == 0


def test_no_tenant_takes_all_places_from_the_others() -> None:
    """Unless it says otherwise, or is the only one."""

    def most_of(admission: ApiAdmission, tenant: ApiTenant) -> int:
        for number in range(100):
            try:
                admission.admit(tenant, 1)
            except ApiError:
                return number
        raise AssertionError("no end to them")

    greedy, second, own = ApiTenant("greedy"), ApiTenant("second"), ApiTenant("own", max_requests=10)
    assert most_of(ApiAdmission(12, Metrics("m")), greedy) == 12
    shared = ApiAdmission(12, Metrics("m"), is_shared=True)
    assert most_of(shared, greedy) == 6
    assert most_of(shared, second) == 3
    with pytest.raises(ApiError):
        shared.admit(greedy, 1)
    assert shared.num_open == 9
    assert most_of(ApiAdmission(12, Metrics("m"), is_shared=True), own) == 10


def test_the_last_places_are_for_other_addresses_than_the_one_that_has_the_rest() -> None:
    admission = ApiAdmission(32, Metrics("m"))
    for _ in range(30):
        admission.admit(ANYBODY, 1, address="many")
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYBODY, 1, address="many")
    assert (refused.value.status, refused.value.code) == (429, "address_share")
    assert "30 from your address" in str(refused.value)
    with pytest.raises(ApiError):
        admission.require(ANYBODY, 1, "many")
    others = [admission.admit(ANYBODY, 1, address=name) for name in ("few", "another")]
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYBODY, 1, address="a third")
    assert refused.value.code == "queue_full"
    for one in others:
        one.release()
    assert admission.admit(ANYBODY, 1, 2, "few")
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYBODY, 31, address="many")  # no address ever has as many
    assert refused.value.code == "too_many_answers"


def test_an_address_has_so_many_requests_a_minute() -> None:
    now = 1000.0
    admission = ApiAdmission(64, Metrics("m"), per_minute_of_address=3, clock=lambda: now)
    admission.admit(ANYBODY, 2, address="one").release()
    now += 20
    admission.admit(ANYBODY, 1, address="one").release()
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYBODY, 1, address="one")
    assert (refused.value.status, refused.value.code) == (429, "rate_limit")
    assert refused.value.retry_after_s == 41
    admission.admit(ANYBODY, 3, address="another").release()
    for _ in range(9):
        admission.admit(ApiTenant("named"), 1, address="one").release()  # a tenant has its own limit, or none
    now += 41
    admission.admit(ANYBODY, 1, address="one").withdraw()  # what was wrong counts in no minute
    admission.admit(ANYBODY, 2, address="one").release()
    with pytest.raises(ApiError) as refused:
        admission.admit(ANYBODY, 4, address="a third")
    assert refused.value.code == "too_many_answers"


def test_addresses_of_the_minutes_before_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_MIN_REMEMBERED", 10)
    now = 1000.0
    admission = ApiAdmission(64, Metrics("m"), per_minute_of_address=1, clock=lambda: now)
    for number in range(200):
        now += 7
        admission.admit(ANYBODY, 1, address=f"a{number}").release()
        assert len(admission._recent) <= 20
    with pytest.raises(ApiError):
        admission.admit(ANYBODY, 1, address="a199")
