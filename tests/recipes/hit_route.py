"""The recipe's smallest route: how many tokens of a prompt are in memory, for the tenant whose key it is."""

from fastapi import APIRouter

from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute
from quire.server.schemas.common import TokenId
from quire.server.schemas.strict_body import StrictBody

router = APIRouter(route_class=BodyRoute)


class Prompt(StrictBody):
    tokens: list[TokenId]


@router.post("/hit")
async def hit(body: Prompt, service: TheService, tenant: TheTenant) -> dict[str, int]:
    found = await service.engine.explain(body.tokens, **tenant.key(None))
    return {"num_tokens": found.num_tokens, "num_hit_tokens": found.num_hit_tokens}
