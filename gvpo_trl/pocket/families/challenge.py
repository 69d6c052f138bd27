"""Families of tasks on apps that no train split shows.

The instruction names the API to use, and only the docs of this API name its arguments.
"""

from .base import (
    CHALLENGE_SPLITS,
    DONE,
    Effect,
    Family,
    Slip,
    added,
    among,
    docs,
    docs_slips,
    equal,
    login,
    login_slips,
    misspelt_token,
    no_token,
    swap,
)
from .vocabulary import QUANTITIES, WORDS, person


def _file_end(values: dict) -> str:
    return (
        f'apis.file_system.create_file(file_path="~/{values["file"]}.txt", content="{values["content"]}", '
        f"access_token=token)\n{DONE}"
    )


def _new_file(values: dict) -> list[Effect]:
    """Expect the file and the folders above it, which AppWorld creates with a user's first file."""
    owner = person(values["supervisor"])
    paths = ("/", "/home/", f"/home/{owner.first_name.lower()}/")
    folders = [added("file_system.Directory", user_id=owner.id, path=path) for path in paths]
    path = f"{paths[-1]}{values['file']}.txt"
    return [added("file_system.File", user_id=owner.id, path=path, compressed_data=[]), *folders]


FILE_WRITE = Family(
    name="file_write",
    apps=("file_system",),
    difficulty=1,
    phrases=(
        "With create_file of file_system, make the file ~/{file}.txt with the content {content}.",
        "Use create_file of file_system to write {content} to a new file ~/{file}.txt .",
    ),
    draw=lambda draw: {"file": draw.word(), "content": draw.word()},
    rows=lambda values: [],
    turns=lambda values: [docs("file_system", "create_file"), login("file_system"), _file_end(values)],
    slips=lambda values: [
        docs_slips("file_system", "create_file"),
        login_slips("file_system"),
        [
            swap(_file_end(values), "file_path=", "path=", "wrong argument name"),
            no_token(_file_end(values)),
            misspelt_token(_file_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_file_end(values), "content=", "text=", "an argument that is ignored"),
        swap(_file_end(values), f', content="{values["content"]}"', "", "an empty file"),
        swap(_file_end(values), f"~/{values['file']}.txt", f"~/{values['content']}.txt", "wrong file name"),
        Slip(DONE, "nothing done"),
    ],
    effects=_new_file,
    changes='file = only(models.changed_records("file_system.File")[0], user_id=main_user.id)',
    checks=(
        equal("One file was made, with the wanted name.", 'file.path.split("/")[-1]', 'public_data["file"] + ".txt"'),
        equal("The new file has the wanted content.", "file.content", 'public_data["content"]'),
    ),
    documented=("file_system", "create_file"),
    splits=CHALLENGE_SPLITS,
)


def _find_product(values: dict) -> str:
    return (
        f'product = apis.amazon.search_products(query="{values["product"]}")[0]\n'
        'print(product["product_id"], product["name"])'
    )


def _cart_end(values: dict) -> str:
    return (
        f'apis.amazon.add_product_to_cart(product_id=product["product_id"], quantity={values["quantity"]}, '
        f"access_token=token)\n{DONE}"
    )


CART_ADD = Family(
    name="cart_add",
    apps=("amazon",),
    difficulty=2,
    phrases=(
        "With add_product_to_cart of amazon, put {quantity} pieces of {product} into my cart.",
        "Use add_product_to_cart of amazon: my cart should hold {product}, {quantity} pieces.",
    ),
    draw=lambda draw: {"product": draw.word(), "quantity": draw.choice(QUANTITIES)},
    rows=lambda values: [],
    turns=lambda values: [
        docs("amazon", "add_product_to_cart"),
        login("amazon"),
        _find_product(values),
        _cart_end(values),
    ],
    slips=lambda values: [
        docs_slips("amazon", "add_product_to_cart"),
        login_slips("amazon"),
        [
            swap(_find_product(values), "search_products", "find_product", "an API that is not there"),
            swap(_find_product(values), 'product["product_id"]', 'product["id"]', "wrong key"),
        ],
        [
            swap(_cart_end(values), "product_id=", "product=", "wrong argument name"),
            swap(_cart_end(values), 'product["product_id"]', f'"{values["product"]}"', "a name where an id belongs"),
            no_token(_cart_end(values)),
            misspelt_token(_cart_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_cart_end(values), "quantity=", "amount=", "an argument that is ignored"),
        swap(_cart_end(values), f", quantity={values['quantity']}", "", "wrong quantity"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"product_id": WORDS.index(values["product"]) + 1},
    effects=lambda values: [added("amazon.CartEntry", user_id=person(values["supervisor"]).id, gift_wrap_quantity=0)],
    changes='entry = only(models.changed_records("amazon.CartEntry")[0], user_id=main_user.id)',
    checks=(
        equal("One product is in the cart, the wanted one.", "entry.product_id", 'private_data["product_id"]'),
        equal("The cart holds the wanted quantity.", "entry.quantity", 'public_data["quantity"]'),
    ),
    documented=("amazon", "add_product_to_cart"),
    splits=CHALLENGE_SPLITS,
)


def _find_member(values: dict) -> str:
    return (
        f'u = apis.splitwise.search_users(query="{values["member"]}", access_token=token)[0]\n'
        'print(u["name"], u["email"])'
    )


def _group_end(values: dict) -> str:
    return (
        f'apis.splitwise.create_group(name="{values["group"]}", member_emails=[u["email"]], '
        f"access_token=token)\n{DONE}"
    )


def _new_group(values: dict) -> list[Effect]:
    owner, member = person(values["supervisor"]).id, person(values["member"]).id
    members = [added("splitwise.GroupMember", user_id=user) for user in (owner, member)]
    return [added("splitwise.Group", user_id=owner), *members, added("splitwise.Notification", user_id=member)]


GROUP_MAKE = Family(
    name="group_make",
    apps=("splitwise",),
    difficulty=3,
    phrases=(
        "With create_group of splitwise, make a group {group} with {member} and me.",
        "Use create_group of splitwise for a new group named {group}; {member} is its other member.",
    ),
    draw=lambda draw: {"group": draw.word(), "member": draw.name()},
    rows=lambda values: [],
    turns=lambda values: [
        docs("splitwise", "create_group"),
        login("splitwise"),
        _find_member(values),
        _group_end(values),
    ],
    slips=lambda values: [
        docs_slips("splitwise", "create_group"),
        login_slips("splitwise"),
        [
            no_token(_find_member(values)),
            misspelt_token(_find_member(values)),
            swap(_find_member(values), 'u["name"]', 'u["first_name"]', "wrong key"),
        ],
        [
            swap(_group_end(values), "member_emails=", "members=", "wrong argument name"),
            swap(_group_end(values), "name=", "title=", "wrong argument name"),
            no_token(_group_end(values)),
            misspelt_token(_group_end(values)),
        ],
    ],
    wrong_ends=lambda values: [
        swap(_group_end(values), '[u["email"]]', "[]", "no member"),
        swap(_group_end(values), f'name="{values["group"]}"', f'name="{values["member"]}"', "wrong name"),
        Slip(DONE, "nothing done"),
    ],
    facts=lambda values: {"member_id": person(values["member"]).id},
    effects=_new_group,
    changes=(
        'group = only(models.changed_records("splitwise.Group")[0], user_id=main_user.id)\n'
        'added = models.changed_records("splitwise.GroupMember")[0]\n'
        "members = [r.user_id for r in added if group is not None and r.group_id == group.id]"
    ),
    checks=(
        equal("One group was made, with the wanted name.", "group.name", 'public_data["group"]'),
        among("The wanted person is a member.", 'private_data["member_id"]', "members"),
        equal("The group has two members.", "len(members)", "2"),
    ),
    documented=("splitwise", "create_group"),
    splits=CHALLENGE_SPLITS,
)

FAMILIES = (FILE_WRITE, CART_ADD, GROUP_MAKE)
