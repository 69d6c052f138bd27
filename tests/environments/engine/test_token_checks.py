"""Access tokens are verified in one place, whatever parameter brings them, and only those given out count."""

import json
import subprocess

from gvpo_trl.environments.appworld.setup import appworld_python

SURVEY = """
import inspect, json, re
import appworld.apps.api_lib as library
from appworld.apps import get_all_apps
from appworld.common.utils import get_name_to_apis, import_apis_module
from appworld.requester import build_main_app

public = {f for a in get_all_apps(skip_admin=True) for f in get_name_to_apis(a, ignore_private_apis=True).values()}
found = {"schemes": set(), "parameters": set(), "unguarded": set(), "readers": set()}
for mounted in build_main_app(tuple(sorted(get_all_apps()))).routes:
    for route in getattr(getattr(mounted, "app", None), "routes", ()):
        if getattr(route, "endpoint", None) not in public:
            continue
        waiting = [route.dependant]
        while waiting:
            dependant = waiting.pop()
            waiting += dependant.dependencies
            found["schemes"] |= {type(r.security_scheme).__name__ for r in dependant.security_requirements}
            fields = [*dependant.query_params, *dependant.path_params, *dependant.header_params]
            fields += [*dependant.body_params, *dependant.cookie_params]
            found["parameters"] |= {field.name for field in fields if "token" in field.name.lower()}
        if "token" in str(inspect.signature(route.endpoint)) and route.dependant.call is not route.endpoint:
            found["unguarded"].add(route.endpoint.__name__)
for app in get_all_apps():
    source = inspect.getsource(import_apis_module(app))
    found["readers"] |= set(re.findall(r"jwt|_get_payload|SECRET", source))
found["readers"] |= set(re.findall(r"jwt\\.\\w+", inspect.getsource(library)))
print(json.dumps({name: sorted(values) for name, values in found.items()}))
"""


def test_every_public_endpoint_takes_its_tokens_through_the_guarded_verification(pocket_root, appworld_venv, tmp_path):
    survey = subprocess.run(
        [appworld_python(appworld_venv), "-I", "-c", SURVEY],
        env={"APPWORLD_ROOT": str(pocket_root), "APPWORLD_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert survey.returncode == 0, survey.stderr[-2000:]
    assert json.loads(survey.stdout) == {
        "schemes": ["LogInOutManager"],
        "parameters": ["file_system_access_token"],
        "unguarded": [],
        "readers": [],
    }


FORGE = """
import json
b, hmac, hashlib = map(__import__, ("base64", "hmac", "hashlib"))
mine = apis.supervisor.show_profile()["email"]
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = apis.file_system.login(username=mine, password=passwords["file_system"])["access_token"]
def decoded(part): return json.loads(b.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
def encoded(data): return b.urlsafe_b64encode(data).rstrip(b"=").decode()
header, payload, _ = token.split(".")
payload = encoded(json.dumps(decoded(payload) | {"more": 1}).encode())
forged = f"{header}.{payload}." + encoded(hmac.new(b"SECRET", f"{header}.{payload}".encode(), hashlib.sha256).digest())
for value in (token, forged):
    try:
        apis.file_system.show_account(access_token=value)
        print("taken")
    except Exception as error:
        print(error)
"""


def test_one_s_own_token_counts_and_a_copy_that_was_not_given_out_does_not(environments, pocket_root):
    task = (pocket_root / "data" / "datasets" / "train.txt").read_text().split()[0]
    with environments.open(task) as episode:
        lines = episode.step(FORGE).text.splitlines()
    assert lines[0] == "taken"
    assert lines[1] == "Response status code is 401:"
