"""Lists the keys of a RayService, ray.io/v1, as KubeRay v1.7's custom resource definition has them
(github.com/ray-project/kuberay, helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml)."""

from __future__ import annotations

from lorafleet.cluster.checking.pod_shapes import (
    ENV,
    ENV_FROM,
    METADATA,
    MOUNTS,
    POD_TEMPLATE,
    RESOURCES,
    SECURITY,
    SELECTOR,
    SERVICE,
    VALUE_FROM,
)
from lorafleet.cluster.checking.shapes import AMOUNT, AMOUNTS, FLAG, OPEN, TEXT, TEXTS, WHOLE, Shape, schema, words

_OF_GROUP = {"labels": TEXTS, "rayStartParams": TEXTS, "resources": AMOUNTS, "template!": POD_TEMPLATE}

_AUTOSCALER: Shape = {
    "args": [TEXT],
    "command": [TEXT],
    "env": ENV,
    "envFrom": ENV_FROM,
    "idleTimeoutSeconds": WHOLE,
    "image": TEXT,
    "imagePullPolicy": TEXT,
    "resources": RESOURCES,
    "securityContext": SECURITY,
    "upscalingMode": words("Default", "Aggressive", "Conservative"),
    "version": words("v1", "v2"),
    "volumeMounts": MOUNTS,
}

_SECRET: Shape = {"value": TEXT, "valueFrom": VALUE_FROM}

_FAULT_TOLERANCE: Shape = {
    "backend": words("redis", "rocksdb"),
    "externalStorageNamespace": TEXT,
    "redisAddress": TEXT,
    "redisPassword": _SECRET,
    "redisUsername": _SECRET,
    "storage": {
        "accessModes": [TEXT],
        "claimName": TEXT,
        "deletionPolicy": words("DeleteWithCluster", "Retain"),
        "size": AMOUNT,
        "storageClassName": TEXT,
        "subPath": TEXT,
    },
}

_PEERS: Shape = [{"ipBlock": {"cidr!": TEXT, "except": [TEXT]}, "namespaceSelector": SELECTOR, "podSelector": SELECTOR}]
_PORTS: Shape = [{"endPort": WHOLE, "port": AMOUNT, "protocol": TEXT}]
_RULES = {"egressRules": [{"ports": _PORTS, "to": _PEERS}], "ingressRules": [{"from": _PEERS, "ports": _PORTS}]}

_CLUSTER: Shape = {
    "authOptions": {"enableK8sTokenAuth": FLAG, "mode": words("disabled", "token"), "secretName": TEXT},
    "autoscalerOptions": _AUTOSCALER,
    "enableInTreeAutoscaling": FLAG,
    "gcsFaultToleranceOptions": _FAULT_TOLERANCE,
    "headGroupSpec!": {
        **_OF_GROUP,
        "enableIngress": FLAG,
        "headService": SERVICE,
        "ingressOptions": {
            "host": TEXT,
            "path": TEXT,
            "pathType": words("Exact", "Prefix", "ImplementationSpecific"),
            "tls": [{"hosts": [TEXT], "secretName": TEXT}],
        },
        "serviceType": TEXT,
    },
    "headServiceAnnotations": TEXTS,
    "historyServerOptions": OPEN,
    "managedBy": TEXT,
    "networkPolicy": {
        "head": _RULES,
        "mode": words("DenyAll", "DenyAllIngress", "DenyAllEgress"),
        "worker": _RULES,
        "workerGroups": [{**_RULES, "groupName!": TEXT}],
    },
    "rayVersion": TEXT,
    "suspend": FLAG,
    "tlsOptions": {"enabled": FLAG},
    "upgradeStrategy": {"type": words("Recreate", "None")},
    "workerGroupSpecs": [
        {
            **_OF_GROUP,
            "groupName!": TEXT,
            "idleTimeoutSeconds": WHOLE,
            "maxReplicas!": WHOLE,
            "minReplicas!": WHOLE,
            "numOfHosts": WHOLE,
            "priority": WHOLE,
            "replicas": WHOLE,
            "scaleStrategy": {"workersToDelete": [TEXT]},
            "suspend": FLAG,
        }
    ],
}

_SPEC: Shape = {
    "deploymentUnhealthySecondThreshold": WHOLE,
    "excludeHeadPodFromServeSvc": FLAG,
    "managedBy": TEXT,
    "rayClusterConfig!": _CLUSTER,
    "rayClusterDeletionDelaySeconds": WHOLE,
    "serveConfigV2": TEXT,
    "serveService": SERVICE,
    "serviceUnhealthySecondThreshold": WHOLE,
    "suspend": FLAG,
    "upgradeStrategy": {
        "clusterUpgradeOptions": {
            "gatewayClassName!": TEXT,
            "intervalSeconds!": WHOLE,
            "maxSurgePercent": WHOLE,
            "stepSizePercent!": WHOLE,
        },
        "type": TEXT,
    },
}

RAY_SERVICE = schema(
    {"apiVersion!": words("ray.io/v1"), "kind!": words("RayService"), "metadata!": METADATA, "spec!": _SPEC}
)
