"""Files of tuned options: values of recipe fields that `meshpar tune` measured to be faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshpar.hardware.compile_options import fingerprint
from meshpar.pod.multihost import version_of
from meshpar.runs.recipe import Recipe, batch_shapes, build_setup, build_step
from meshpar.sharding.errors import check_cases, problem
from meshpar.sharding.host_resources import read_json, write_json
from meshpar.sharding.printing import Plain, parsed

REFERENCE_STEPS = 1_000_000
"""Number of steps of the optimizer's schedule in fingerprints, so that a run may have any number of steps."""
VERSIONS = ("meshpar", "jax", "jaxlib")
"""Packages whose versions must be equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredProgram(Plain):
    """Program, devices and versions that a measurement is valid for."""

    program: str
    """Fingerprint of the step before tuning, with a schedule of `REFERENCE_STEPS` steps."""
    devices: str
    """Number and name of the devices."""
    versions: Mapping[str, str]
    """Versions of `VERSIONS`."""

    @staticmethod
    def of(recipe: Recipe, mesh: Mesh) -> MeasuredProgram:
        """Lower the training step of a recipe on the devices of a mesh."""
        fields: dict[str, Any] = {"steps": REFERENCE_STEPS}
        if getattr(recipe.optimizer, "schedule_steps", None) is not None:
            fields["optimizer"] = dataclasses.replace(recipe.optimizer, schedule_steps=None)  # type: ignore[type-var]
        reference = recipe.replace(**fields)
        setup, step = build_setup(reference, mesh), build_step(reference)
        lowered = step.lower(setup.abstract, batch_shapes(reference))
        return MeasuredProgram(
            program=fingerprint(lowered, step.compile_options(setup)),
            devices=f"{mesh.devices.size} × {mesh.devices.flat[0].device_kind}",
            versions={name: version_of(name) for name in VERSIONS},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(Plain):
    """The result of `meshpar tune` in a file, for `meshpar train --tuned`."""

    recipe: str
    """Name of the recipe."""
    settings: tuple[str, ...]
    """Faster values of recipe fields, as `FIELD=VALUE`. Empty if no change was faster."""
    ratio: float | None
    """Measured time of a step with the settings, relative to the recipe."""
    noise: float | None
    """Half of the 95 % interval of the ratio."""
    date: str
    subject: MeasuredProgram

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        write_json(path, self.to_json(), "tuned options")

    @staticmethod
    def load(path: str | Path) -> Tuned:
        """Read a file that `save` has written.

        Raises:
          MeshparError: the file cannot be read, or has other content.
        """
        where, fix = f"tuned options `{path}`", "write the file again: meshpar tune RECIPE --save FILE"
        data = read_json(path, where, fix)
        is_tuned = isinstance(data, dict) and isinstance(data.get("subject"), dict)
        reason = "it is not a file of `meshpar tune --save`"
        check_cases(where, "read it", "damaged-file", (not is_tuned, reason, fix))
        subject = parsed(MeasuredProgram, data["subject"], where, fix)
        tuned = parsed(Tuned, data | {"subject": subject}, where, fix)
        is_list = isinstance(tuned.settings, tuple) and all(isinstance(text, str) for text in tuned.settings)
        versions, numbers = subject.versions, [tuned.ratio, tuned.noise] if tuned.settings else []
        check_cases(
            where, "read it", "damaged-file",
            (not is_list, "its settings are not a list of texts", fix),
            (not isinstance(versions, dict) or {*versions} != {*VERSIONS}, f"its versions are not {VERSIONS}", fix),
            (not all(isinstance(x, int | float) for x in numbers), "its ratio or noise is not a number", fix),
        )  # fmt: skip
        return tuned

    def apply(self, recipe: Recipe, mesh: Mesh) -> Recipe:
        """Return the recipe with the settings.

        Raises:
          MeshparError: the settings were measured with a different program, on different devices, or with different
            versions.
        """
        measured, current = self.subject, MeasuredProgram.of(recipe, mesh)
        versions = {**current.versions}
        reasons = [
            f"{name} {version} was measured, and {versions.get(name)} is installed"
            for name, version in measured.versions.items()
            if versions.get(name) != version
        ]
        if measured.devices != current.devices:
            reasons.insert(0, f"{measured.devices} was measured, and the run has {current.devices}")
        if not reasons and measured.program != current.program:
            reasons.append(
                f"program {measured.program} was measured, and the program of the recipe is {current.program}"
            )
        if reasons:
            where = f"tuned options of {self.recipe} ({self.date})"
            fix = "run `meshpar tune` again, with the recipe and the options of this run, or train without --tuned"
            raise problem(where, f"train {recipe.name} with them", "; ".join(reasons), fix, code="conflict")
        return recipe.override(*self.settings)

    def __str__(self) -> str:
        if not self.settings:
            return f"no change of the recipe was faster ({self.date})"
        return f"{' '.join(self.settings)} ({self.ratio:.3f} × the time, {self.date})"
