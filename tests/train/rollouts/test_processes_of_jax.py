# SPDX-License-Identifier: Apache-2.0
"""With two processes of JAX, the first asks the outside world, and both continue."""

import pytest

from tests.two_processes import found_by_two

PROGRAM = """
import os
from tessera.errors import ServerError
from tessera.train.rollouts.environments import Environments
from tessera.train.rollouts.openai_server import OpenAIServer

class Own:
    def __init__(self, number):
        self.number = number

    def step(self, messages):
        messages[0]["content"] = "changed"
        if self.number == 2:
            raise ValueError(os.getpid())
        said = [{"role": "tool", "content": f"é {os.getpid()}"}]
        return said, self.number / 3, False

environments = Environments([lambda i=i: Own(i) for i in range(3)])
said = [{"role": "user", "content": "hi"}]
found = environments.step([(0, said), (1, said), (2, said)])
try:
    OpenAIServer("http://127.0.0.1:9/v1", "none", timeout=0.1)
except ServerError as error:
    found.append(error.code)
print("FOUND", json.dumps([found, said, [os.getpid(), rank]]))
"""
WEIGHTS = """
from tempfile import TemporaryDirectory
from tessera.mesh import Mesh
from tessera.errors import ServerError
from tessera.train.models import from_pretrained
from tests.train.rollouts import test_server_weights as tests

with tests.serving() as server, TemporaryDirectory() as folder:
    server.answer = tests.sglang
    # The second process does not reach it.
    url = "http://127.0.0.1:9/v1" if rank else server.url
    given = f"sglang:{folder}", url, "tiny", tests.MODEL, tests.Published()
    weights = tests.ServerWeights(*given)
    params = tests.drawn(tests.MODEL, 1, Mesh(("fsdp",), shape=(4,)))
    assert not jax.tree.leaves(params)[0].is_fully_addressable
    found = [weights.send(params).weight_version]
    if rank == 0:
        whole = tests.drawn(tests.MODEL, 1)
        loaded = from_pretrained(server.loaded[0][0])[1]
        jax.tree.map(np.testing.assert_array_equal, loaded, whole)
    server.answer = tests.vllm
    given = f"vllm:{folder}", url, "tiny", tests.WITH_ADAPTERS, tests.Published()
    server.names = ["tiny"]
    drawn = tests.drawn(tests.WITH_ADAPTERS, 1, Mesh(("fsdp",), shape=(4,)))
    found.append(tests.ServerWeights(*given).send(drawn).model)
    server.refusal = 400, {"success": False, "message": "no"}
    try:
        weights.send(params)
    except ServerError as error:
        found.append(error.code)
print("FOUND", json.dumps(found))
"""


@pytest.mark.slow(reason="it starts two processes of JAX")
def test_all_processes_have_the_answers_and_the_errors_of_the_first():
    one, other = sorted(found_by_two(PROGRAM), key=lambda found: found[-1][1])
    assert one[:2] == other[:2]
    answers, said, (process, _) = one
    assert said == [{"role": "user", "content": "hi"}]
    spoken = [{"role": "tool", "content": f"é {process}"}]
    assert answers[0] == [spoken, 0.0, False, ""]
    assert answers[1] == [spoken, 1 / 3, False, ""]
    assert answers[2][:3] == [[], None, True]
    assert answers[2][3].startswith(f"raised ValueError ({process}, ")
    assert answers[3:] == ["T721"]


@pytest.mark.full
def test_the_first_sends_the_weights_of_all():
    one, other = found_by_two(WEIGHTS)
    assert one == other
    assert all(name.startswith("tessera-policy-") for name in one[:2])
    assert one[2:] == ["T721"]
