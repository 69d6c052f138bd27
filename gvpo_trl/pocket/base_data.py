"""Makes the databases that every world of a pocket root starts from: accounts, songs, products and the API docs.

AppWorld's interpreter imports this file from `generator.py`. It may import the standard library, `appworld` and the
families.
"""

import hashlib
from datetime import datetime
from pathlib import Path

from gvpo_trl.pocket import families

NOW = datetime(2023, 5, 18, 12, 0, 0)
"""The date and time in every world."""
PASSWORD_LENGTH = 16
"""Hexadecimal digits of a password."""


def write_base(root: Path, seed: int) -> None:
    """Make the databases and save them under `root/data/base_dbs`."""
    from appworld.apps import get_all_apps
    from appworld.apps.model_lib import get_db_home_path
    from appworld.collections.models import ModelCollection

    home = get_db_home_path(storage_type="memory", type="base")
    models = ModelCollection.load(
        to_db_home_path=home, from_db_home_path=home, load_apps=get_all_apps(), create_db=True
    )
    add_people(models, seed)
    add_notifiers(models, seed)
    add_songs(models)
    add_products(models)
    add_api_docs(models)
    models.save(db_home_path=str(root / "data" / "base_dbs"), format="full", save_model_hashes=True, vaccum=True)
    models.close()


def password(seed: int, app: str, email: str) -> str:
    """Return the password of an account. It follows from the seed of the data and from nothing that a world shows."""
    digest = hashlib.sha256(f"pocket password/{seed}/{app}/{email}".encode()).hexdigest()
    return digest[:PASSWORD_LENGTH]


def add_people(models, seed: int) -> None:
    """Give every person an account in every app, with the same id everywhere."""
    for person in families.PEOPLE:
        names = {"first_name": person.first_name, "last_name": person.last_name}
        models.admin.MainUser.create_save(
            **names, email=person.email, phone_number=person.phone_number, birthday=person.birthday
        )
        for app in families.vocabulary.LOGIN_APPS:
            fields = {**names, "password": password(seed, app, person.email)}
            fields |= {"created_at": NOW, "last_logged_in": NOW}
            if app == "phone":
                fields["phone_number"] = person.phone_number
            else:
                fields["email"] = person.email
            if app not in ("phone", "gmail"):
                fields["verified"] = True
            if app == "venmo":
                fields["venmo_balance"] = 1000.0
            models[app].User.create_save(**fields)


def add_notifiers(models, seed: int) -> None:
    """Make the accounts from which the apps send verification and password reset codes.

    AppWorld sends these codes from accounts whose names and addresses are fixed. Their outboxes hold every code, so an
    agent must neither be able to sign up for such an account nor know its password.
    """
    from appworld.apps.api_lib import CompanyNotifier

    for app in families.vocabulary.LOGIN_APPS:
        notifier = CompanyNotifier(app.replace("_", " "))
        addresses = {
            "gmail": {"email": notifier.email_address},
            "file_system": {"email": notifier.email_address, "verified": True},
            "phone": {"phone_number": notifier.phone_number},
        }
        for account, address in addresses.items():
            models[account].User.create_save(
                first_name=notifier.first_name,
                last_name=notifier.last_name,
                password=password(seed, account, notifier.email_address),
                created_at=NOW,
                last_logged_in=NOW,
                **address,
            )


def add_songs(models) -> None:
    """Make one song of each word, and the artists."""
    words = families.vocabulary
    for name in words.ARTISTS:
        models.spotify.Artist.create_save(name=name, genre="pop", created_at=NOW)
    for position, title in enumerate(words.WORDS):
        models.spotify.Song.create_save(
            title=title,
            artist_ids=[words.ARTISTS.index(words.artist_of(title)) + 1],
            duration=180 + position,
            release_date=datetime(2010 + position % 12, 1, 15),
            genre=words.genre_of(title),
            play_count=100 + position,
        )


def add_products(models) -> None:
    """Make one product of each word, all from one seller."""
    models.amazon.Seller.create_save(name="Bazaar", rating=4.0)
    for position, name in enumerate(families.vocabulary.WORDS):
        models.amazon.Product.create_save(
            product_type="toy",
            name=name,
            description="A toy.",
            seller_id=1,
            price=5.0 + position,
            delivery_days=1 + position % 14,
            inventory_quantity=50,
            weight=1.0,
            length=1.0,
            width=1.0,
            height=1.0,
        )


def add_api_docs(models) -> None:
    """Fill the database from which the app `api_docs` answers."""
    from appworld.apps import get_all_apps
    from appworld.collections.api_docs import ApiDocCollection

    for docs in ApiDocCollection.build(tuple(get_all_apps(skip_admin=True))).values():
        for doc in docs.values():
            fields = {key: value for key, value in doc.items() if key != "app_name"}
            models.api_docs.ApiDoc.create_save(app_name_=doc["app_name"], **fields)
