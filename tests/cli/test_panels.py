"""A long --help is read in panels, which mean the same in every command."""

import typer

from headloom.cli import groups
from headloom.cli.app import app

PANELS = {groups.WHAT, groups.MODEL, groups.TEXT, groups.TRAINING, groups.MACHINE}
# of one name, and another meaning in each command: a batch to train with or to measure at, how many layers or which
# ones are grafted, and --set of whatever the command sets
APART = {"batch_size", "layers", "settings"}


def commands(group):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", found) for inner, found in commands(command))
        else:
            yield name, command


def options(command):
    return {
        option.name: option.rich_help_panel
        for option in command.params
        if option.param_type_name == "option" and option.name != "help"
    }


def test_long_commands_have_their_options_in_panels_of_one_meaning():
    found = {name: options(command) for name, command in commands(typer.main.get_command(app))}
    long = {name: panels for name, panels in found.items() if len(panels) > 10}
    assert {"compare", "train", "finetune", "bench speed", "bench models"} <= set(long)
    for name, panels in {**long, "cost": found["cost"]}.items():
        assert set(panels.values()) <= PANELS, (name, [option for option, panel in panels.items() if panel is None])
    for option in set().union(*long.values()) - APART:
        assert len({panels[option] for panels in long.values() if option in panels}) == 1, option
