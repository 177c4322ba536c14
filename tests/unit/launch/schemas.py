"""What the API of a cluster takes: unknown keys, missing ones and values of another type are faults.

JobSets and pods: the classes that Kubeflow generates from the OpenAPI schemas of JobSet and of Kubernetes. RayJobs: the
fields of KubeRay's API `ray.io/v1`, written down here, with Kubernetes' own pods in them. A few rules that controllers
add to the types are checked too.
"""

import importlib
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

_POD = object()
_STRINGS = {"*": str}
_HEAD = {
    "serviceType": str,
    "headService": dict,
    "enableIngress": bool,
    "rayStartParams!": _STRINGS,
    "template!": _POD,
}
_WORKERS = {
    "groupName!": str,
    "replicas": int,
    "minReplicas!": int,
    "maxReplicas!": int,
    "numOfHosts": int,
    "rayStartParams!": _STRINGS,
    "template!": _POD,
    "scaleStrategy": dict,
    "suspend": bool,
    "idleTimeoutSeconds": int,
}
_CLUSTER = {
    "headGroupSpec!": _HEAD,
    "workerGroupSpecs": [_WORKERS],
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": dict,
    "headServiceAnnotations": _STRINGS,
    "gcsFaultToleranceOptions": dict,
    "managedBy": str,
    "suspend": bool,
}
_RAY_JOB = {
    "apiVersion!": str,
    "kind!": str,
    "metadata!": dict,
    "spec!": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "rayClusterSpec": _CLUSTER,
        "submitterPodTemplate": _POD,
        "metadata": _STRINGS,
        "clusterSelector": _STRINGS,
        "submitterConfig": {"backoffLimit": int},
        "managedBy": str,
        "deletionStrategy": dict,
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "jobId": str,
        "submissionMode": str,
        "entrypointResources": str,
        "entrypointNumCpus": float,
        "entrypointNumGpus": float,
        "ttlSecondsAfterFinished": int,
        "shutdownAfterJobFinishes": bool,
        "suspend": bool,
    },
}
_CLASSES = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "JobSet": "JobsetV1alpha2JobSet",
    "Pod": "IoK8sApiCoreV1PodTemplateSpec",
    "Metadata": "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest."""
    if manifest["kind"] == "RayJob":
        found = [*_by_table(manifest, _RAY_JOB, ""), *_by_class(manifest["metadata"], _class("Metadata"), ".metadata")]
    else:
        found = list(_by_class(manifest, _class(manifest["kind"]), ""))
    return found or list(_rules(manifest))


def _rules(manifest: dict[str, Any]) -> Iterator[str]:
    """Rules that no type expresses."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", manifest["metadata"]["name"]):
        yield ".metadata.name: no label of at most 47 letters that begins with a letter"
    spec = manifest.get("spec", {})
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
            yield f".spec.failurePolicy.rules: {rule['name']} is no name of a rule"
    for job in spec.get("replicatedJobs", []):
        template = job["template"]["spec"]
        if "podFailurePolicy" in template and template["template"]["spec"].get("restartPolicy") != "Never":
            yield ".spec.replicatedJobs: podFailurePolicy needs restartPolicy Never"
    if "metadata" in spec and "rayVersion" not in spec["rayClusterSpec"]:
        yield ".spec.metadata: needs rayClusterSpec.rayVersion"


def _class(name: str) -> Any:
    return getattr(importlib.import_module("kubeflow_trainer_api.models"), _CLASSES.get(name, name))


def _by_class(value: Any, model: Any, path: str) -> Iterator[str]:
    """Faults that a generated class finds, and the keys that it would pass over."""
    yield from _unknown(value, model, path)
    try:
        model.from_dict(value)
    except ValueError as error:
        yield f"{path}: {error}"


def _unknown(value: Any, annotation: Any, path: str) -> Iterator[str]:
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for one in inner:
            yield from _unknown(value, one, path)
    elif isinstance(value, list) and inner:
        for number, item in enumerate(value):
            yield from _unknown(item, inner[0], f"{path}[{number}]")
    elif isinstance(value, dict) and hasattr(annotation, "model_fields"):
        known = {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
        for key, item in value.items():
            if key in known:
                yield from _unknown(item, known[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: unknown"


def _by_table(value: Any, wanted: Any, path: str) -> Iterator[str]:
    if wanted is _POD:
        yield from _by_class(value, _class("Pod"), path)
    elif isinstance(wanted, list):
        for number, item in enumerate(value):
            yield from _by_table(item, wanted[0], f"{path}[{number}]")
    elif isinstance(wanted, dict):
        known = {key.rstrip("!"): one for key, one in wanted.items()}
        yield from (f"{path}.{key[:-1]}: missing" for key in wanted if key.endswith("!") and key[:-1] not in value)
        for key, item in value.items():
            if key in known or "*" in known:
                yield from _by_table(item, known.get(key, known.get("*")), f"{path}.{key}")
            else:
                yield f"{path}.{key}: unknown"
    elif not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{path}: is no {wanted.__name__}"
