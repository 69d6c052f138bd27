"""Families of tasks on todoist."""

from .base import (
    DONE,
    Check,
    Family,
    Row,
    Slip,
    docs,
    docs_slips,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
    updated,
)
from .vocabulary import PRIORITIES, person


def project(values: dict, name: str) -> list[Row]:
    """Make a project of the supervisor. The row's label is the project's name."""
    owner = person(values["supervisor"]).id
    return [
        Row("todoist", "Project", {"user_id": owner, "name": name}, name),
        Row(
            "todoist",
            "ProjectCollaboratorLink",
            {"user_id": owner, "project_id": f"@{name}", "is_favorite": False, "is_archived": False},
        ),
    ]


def _task(values: dict, title: str, position: int) -> Row:
    return Row(
        "todoist",
        "Task",
        {
            "user_id": person(values["supervisor"]).id,
            "project_id": f"@{values['project']}",
            "title": title,
            "priority": "medium",
            "is_completed": False,
            "order_index": position,
        },
    )


def _find_task(values: dict) -> str:
    return (
        f'p = apis.todoist.show_projects(query="{values["project"]}", access_token=token)[0]\n'
        'tasks = apis.todoist.show_tasks(project_id=p["project_id"], access_token=token)["no_section_tasks"]\n'
        'for t in tasks: print(t["task_id"], t["title"])'
    )


def _finish_end(values: dict, task_id: int | str | None = None) -> str:
    task_id = task_id or 1 + values["tasks"].index(values["task"])
    return (
        f'apis.todoist.update_task(task_id={task_id}, is_completed=True, priority="{values["priority"]}", '
        f"access_token=token)\n{DONE}"
    )


def _draw_tasks(draw) -> dict:
    task = draw.word()
    return {
        "project": draw.word(),
        "task": task,
        "tasks": draw.shuffled([task, draw.word(), draw.word()]),
        "priority": draw.choice(PRIORITIES),
    }


def _finish_slips(values: dict) -> list[list[Slip]]:
    look, end = _find_task(values), _finish_end(values)
    return [
        docs_slips("todoist", "update_task"),
        login_slips("todoist"),
        [
            no_token(look),
            misspelt_token(look),
            swap(look, 'p["project_id"]', 'p["id"]', "wrong key"),
            swap(look, '["no_section_tasks"]', '["tasks"]', "wrong key"),
            swap(look, "project_id=", "project=", "wrong argument name"),
        ],
        [
            swap(end, "task_id=", "id=", "wrong argument name"),
            swap(end, f'priority="{values["priority"]}"', 'priority="top"', "a value that is not allowed"),
            Slip(_finish_end(values, f'"{values["task"]}"'), "a title where an id belongs"),
            no_token(end),
            misspelt_token(end),
        ],
    ]


TASK_FINISH = Family(
    name="task_finish",
    apps=("todoist",),
    difficulty=2,
    phrases=(
        "With update_task of todoist, complete the task {task} of project {project} and give it {priority} priority.",
        "Use update_task of todoist: in project {project} complete the task {task} and give it {priority} priority.",
    ),
    draw=_draw_tasks,
    rows=lambda values: [
        *project(values, values["project"]),
        *(_task(values, title, position) for position, title in enumerate(values["tasks"])),
    ],
    turns=lambda values: [docs("todoist", "update_task"), login("todoist"), _find_task(values), _finish_end(values)],
    slips=_finish_slips,
    wrong_ends=lambda values: [
        swap(_finish_end(values), "is_completed=", "completed=", "an argument that is ignored"),
        swap(_finish_end(values), f', priority="{values["priority"]}"', "", "no priority"),
        swap(_finish_end(values), ", is_completed=True", "", "not completed"),
        Slip(_finish_end(values, 1 + (values["tasks"].index(values["task"]) + 1) % 3), "wrong task"),
        Slip(DONE, "nothing done"),
    ],
    effects=lambda values: [
        updated("todoist.Task", 1 + values["tasks"].index(values["task"]), "is_completed", "priority")
    ],
    changes=('changed = models.changed_records("todoist.Task")[1]\ntask = only(changed)'),
    checks=(
        equal("One task was changed, the wanted one.", "task.title", 'public_data["task"]'),
        Check(
            "The wanted task is completed.",
            'done = [t.title for t in changed if t.is_completed]\ntest.case(public_data["task"], "in", done)',
        ),
        Check(
            "The wanted task has the wanted priority.",
            'titles = [t.title for t in changed if t.priority == public_data["priority"]]\n'
            'test.case(public_data["task"], "in", titles)',
        ),
    ),
    documented=("todoist", "update_task"),
)

FAMILIES = (TASK_FINISH,)
