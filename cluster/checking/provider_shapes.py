"""Lists the keys that the schema of `ray up` leaves open: those of a provider, and of the machines that it starts."""

from __future__ import annotations

import functools
from typing import Any

from lorafleet.cluster.checking.keys import Schema
from lorafleet.cluster.checking.shapes import FLAG, OPEN, TEXT, TEXTS, WHOLE, Shape, schema

_OF_ALL = {
    "type!": TEXT,
    "use_internal_ips": FLAG,
    "disable_node_updaters": FLAG,
    "disable_launch_config_check": FLAG,
}
_ZONES = {"region!": TEXT, "availability_zone": TEXT, "cache_stopped_nodes": FLAG}

PROVIDERS: dict[str, Shape] = {
    "aws": {
        **_OF_ALL,
        **_ZONES,
        "aws_credentials": OPEN,
        "cloudwatch": OPEN,
        "key_pair": {"key_name": TEXT},
        "security_group": {"GroupName": TEXT, "IpPermissions": OPEN},
    },
    "gcp": {**_OF_ALL, **_ZONES, "gcp_credentials": OPEN, "project_id!": TEXT},
    "local": {
        **_OF_ALL,
        "coordinator_address": TEXT,
        "external_head_ip": TEXT,
        "head_ip": TEXT,
        "worker_ips": [TEXT],
    },
}

# The keys of Compute Engine's instances: cloud.google.com/compute/docs/reference/rest/v1/instances
_DISK: Shape = {
    "architecture": TEXT,
    "autoDelete": FLAG,
    "boot": FLAG,
    "deviceName": TEXT,
    "diskEncryptionKey": OPEN,
    "diskSizeGb": OPEN,
    "forceAttach": FLAG,
    "guestOsFeatures": OPEN,
    "initializeParams": {
        "architecture": TEXT,
        "description": TEXT,
        "diskName": TEXT,
        "diskSizeGb": OPEN,
        "diskType": TEXT,
        "enableConfidentialCompute": FLAG,
        "labels": TEXTS,
        "provisionedIops": OPEN,
        "provisionedThroughput": OPEN,
        "resourcePolicies": [TEXT],
        "sourceImage": TEXT,
        "sourceSnapshot": TEXT,
        "storagePool": TEXT,
    },
    "interface": TEXT,
    "mode": TEXT,
    "source": TEXT,
    "type": TEXT,
}
_GCP_INSTANCE: Shape = {
    "advancedMachineFeatures": OPEN,
    "canIpForward": FLAG,
    "confidentialInstanceConfig": OPEN,
    "deletionProtection": FLAG,
    "description": TEXT,
    "disks": [_DISK],
    "displayDevice": OPEN,
    "guestAccelerators": [{"acceleratorCount": WHOLE, "acceleratorType": TEXT}],
    "hostname": TEXT,
    "instanceEncryptionKey": OPEN,
    "keyRevocationActionType": TEXT,
    "labels": TEXTS,
    "machineType!": TEXT,
    "metadata": {"items": [{"key!": TEXT, "value!": TEXT}]},
    "minCpuPlatform": TEXT,
    "networkInterfaces": [
        {
            "accessConfigs": OPEN,
            "aliasIpRanges": OPEN,
            "ipv6AccessConfigs": OPEN,
            "kind": TEXT,
            "name": TEXT,
            "network": TEXT,
            "networkAttachment": TEXT,
            "networkIP": TEXT,
            "nicType": TEXT,
            "queueCount": WHOLE,
            "stackType": TEXT,
            "subnetwork": TEXT,
        }
    ],
    "networkPerformanceConfig": OPEN,
    "params": OPEN,
    "privateIpv6GoogleAccess": TEXT,
    "reservationAffinity": OPEN,
    "resourcePolicies": [TEXT],
    "scheduling": OPEN,  # Ray's own example has a list here, where Google requires an object.
    "serviceAccounts": [{"email!": TEXT, "scopes!": [TEXT]}],
    "shieldedInstanceConfig": {"enableIntegrityMonitoring": FLAG, "enableSecureBoot": FLAG, "enableVtpm": FLAG},
    "sourceMachineImage": TEXT,
    "tags": {"items": [TEXT]},
}


def provider_schema(kind: str) -> Schema:
    """Returns the schema of `provider`. It is open for kinds that are not listed here."""
    return schema(PROVIDERS.get(kind, OPEN))


def node_schema(kind: str) -> Schema:
    """Returns the schema of `node_config`, which goes to the provider as it is."""
    if kind == "aws":
        return _aws_instance()
    return schema({"gcp": _GCP_INSTANCE, "local": {"resources": OPEN}}.get(kind, OPEN))


@functools.cache  # It is large and takes a second to read.
def _aws_instance() -> Schema:
    """Returns the schema of EC2's RunInstances, from boto3's own description, with the keys that Ray accepts in
    addition."""
    import botocore.session

    service = botocore.session.Session().get_service_model("ec2")
    instance = _of_boto(service.operation_model("RunInstances").input_shape)
    instance["properties"] |= {"SubnetIds": {"type": "array"}, "SecurityGroupIds": {"type": "array"}}
    return {**instance, "required": []}  # Ray fills in the rest.


def _of_boto(shape: Any) -> Schema:
    if shape.type_name == "structure":
        return {
            "type": "object",
            "properties": {name: _of_boto(member) for name, member in shape.members.items()},
            "required": list(shape.required_members),
        }
    if shape.type_name == "list":
        return {"type": "array", "items": _of_boto(shape.member)}
    types = {"string": "string", "integer": "integer", "long": "integer", "boolean": "boolean", "double": "number"}
    kind = types.get(shape.type_name)
    enum = {"enum": list(shape.enum)} if getattr(shape, "enum", None) and shape.name != "InstanceType" else {}
    return {"type": kind, **enum} if kind is not None else {}
