"""Makes calls and queries of all kinds in a host before it forks, so that its children find every cache filled.

SQL is compiled once per engine and statement, and request models and documents are built at their first use. Each of
these takes some ten milliseconds, in every episode. The rehearsal runs in the host's databases, which are restored
afterwards.
"""

import contextlib
from collections.abc import Iterable

NOT_CALLED = ("login", "logout", "delete_account")
"""APIs that are not called. A process refuses a logged-out token for ever, and the next world gets the same token."""


def rehearse_calls(world) -> None:
    """Log in to every app and call each API once, reading ones first, with arguments that pass validation."""
    from appworld.requester import _get_api_name_to_doc

    apis, supervisor = world.apis, world.task.supervisor
    passwords = {entry["account_name"]: entry["password"] for entry in apis.supervisor.show_account_passwords()}
    apis.api_docs.show_api_doc(app_name="spotify", api_name="login")
    apis.api_docs.show_api_descriptions(app_name="spotify")
    for app in world.task.allowed_apps:
        token = None
        for username in (supervisor.email, supervisor.phone_number):
            with contextlib.suppress(Exception):
                token = apis[app].login(username=username, password=passwords[app])["access_token"]
        docs = sorted(
            _get_api_name_to_doc(app, include_private_apis=True).items(), key=lambda item: _is_write(item[1])
        )
        for api, doc in docs:
            if api in apis[app] and api not in NOT_CALLED:
                with contextlib.suppress(Exception):
                    apis[app][api](**_arguments(doc, token))
        world.requester.reset_request_count()
    world.task_completed()
    rehearse_models(world.task.allowed_apps)


def rehearse_models(apps: Iterable[str]) -> None:
    """Create and change a record of each kind, because building the validator of a kind takes 20 ms."""
    from appworld.common.utils import import_models_module

    for app in apps:
        for _, model in import_models_module(app).SQLModel.names_and_models():
            with contextlib.suppress(Exception):
                model.validator()
                fields = model.first().dict()
                fields.pop("id")
                model.create_save(**fields)
            with contextlib.suppress(Exception):
                model.first().save()


def _is_write(doc: dict) -> bool:
    return doc["method"] != "GET"


def _arguments(doc: dict, token: str | None) -> dict:
    """Return the fewest arguments with which a call passes validation, with ids that are likely to exist."""
    arguments = {}
    for parameter in doc["parameters"]:
        if parameter["name"] == "access_token":
            arguments["access_token"] = token
        elif parameter["required"]:
            arguments[parameter["name"]] = _VALUES.get(parameter["type"], "1")
    return arguments


_VALUES = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


def rehearse_evaluation(task_id: str) -> None:
    """Compare every table of a state with itself, as a task's tests do."""
    from appworld.apps.model_lib import get_db_home_path
    from appworld.collections.models import ModelCollection, ModelCollectionPair
    from appworld.task import Task

    task = Task.load(task_id=task_id, load_ground_truth=False)
    end_path = get_db_home_path(storage_type="memory", type="task_output", task_id=task_id)
    start = task.model_collection
    end = ModelCollection.load(
        to_db_home_path=end_path, from_db_home_path=task.models_from_db_home_path, load_apps=task.allowed_apps
    )
    pair = ModelCollectionPair(
        start_db_home_path=start.from_db_home_path,
        start_model_collection=start,
        end_db_home_path=end_path,
        end_model_collection=end,
    )
    pair.start.admin.MainUser.find_one(**task.supervisor)
    pair.end.supervisor.Task.all()
    pair.changed_model_names()
    for app in pair.app_names:
        for name in pair.start[app]:
            if name not in ("SQLModel", "ModelHash"):
                with contextlib.suppress(Exception):
                    pair.changed_records(f"{app}.{name}")
                    pair.end[app][name].first()
