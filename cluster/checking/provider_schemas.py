"""Closes what Ray's schema of `ray up` leaves open: the keys of a provider, and those of EC2's machines."""

from __future__ import annotations

import functools
from typing import Any

from lorafleet.cluster.checking.keys import Schema

# Keys that Ray's code reads, and its schema lacks.
_UNLISTED = {
    "aws": ("aws_credentials", "disable_launch_config_check", "key_pair"),
    "gcp": (),
    "local": ("coordinator_address", "external_head_ip"),
}


def close_provider(schema: Schema, kind: str) -> Schema:
    """Returns Ray's schema of `provider` without other keys than those that Ray reads. Kinds of plug-ins stay open."""
    if kind not in _UNLISTED:
        return schema
    properties = schema["properties"] | {key: {} for key in _UNLISTED[kind]}
    return {**schema, "properties": properties, "additionalProperties": False}


def node_schema(kind: str) -> Schema:
    """Returns the schema of `node_config`, which goes to the provider as it is. Only AWS describes it in a package."""
    return _aws_instance() if kind == "aws" else {}


@functools.cache  # It is large and takes a second to read.
def _aws_instance() -> Schema:
    """Returns the schema of EC2's RunInstances, from boto3's own description, with the keys that Ray accepts in
    addition."""
    import botocore.session

    service = botocore.session.Session().get_service_model("ec2")
    instance = _from_boto(service.operation_model("RunInstances").input_shape)
    instance["properties"] |= {"SubnetIds": {"type": "array"}, "SecurityGroupIds": {"type": "array"}}
    return {**instance, "required": []}  # Ray fills in the rest.


def _from_boto(shape: Any) -> Schema:
    if shape.type_name == "structure":
        return {
            "type": "object",
            "properties": {name: _from_boto(member) for name, member in shape.members.items()},
            "required": list(shape.required_members),
        }
    if shape.type_name == "list":
        return {"type": "array", "items": _from_boto(shape.member)}
    types = {"string": "string", "integer": "integer", "long": "integer", "boolean": "boolean", "double": "number"}
    kind = types.get(shape.type_name)
    enum = {"enum": list(shape.enum)} if getattr(shape, "enum", None) and shape.name != "InstanceType" else {}
    return {"type": kind, **enum} if kind is not None else {}
