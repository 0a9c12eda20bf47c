"""Lists the keys of a Kubernetes pod template, as in the API v1.36, which KubeRay v1.7's RayService uses.

Keys that hardly any pod has are left open: affinity's terms, and volumes of projected, ephemeral and retired kinds.
"""

from __future__ import annotations

from lorafleet.cluster.checking.shapes import AMOUNT, AMOUNTS, FLAG, OPEN, TEXT, TEXTS, WHOLE, Shape

METADATA: Shape = {"annotations": TEXTS, "finalizers": [TEXT], "labels": TEXTS, "name": TEXT, "namespace": TEXT}

RESOURCES: Shape = {"claims": [{"name!": TEXT, "request": TEXT}], "limits": AMOUNTS, "requests": AMOUNTS}

_OF_KEY: Shape = {"key!": TEXT, "name": TEXT, "optional": FLAG}
_REFERENCE: Shape = {"name": TEXT, "optional": FLAG}
_FIELD: Shape = {"apiVersion": TEXT, "fieldPath!": TEXT}
_RESOURCE_FIELD: Shape = {"containerName": TEXT, "divisor": AMOUNT, "resource!": TEXT}
VALUE_FROM: Shape = {
    "configMapKeyRef": _OF_KEY,
    "fieldRef": _FIELD,
    "fileKeyRef": {"key!": TEXT, "optional": FLAG, "path!": TEXT, "volumeName!": TEXT},
    "resourceFieldRef": _RESOURCE_FIELD,
    "secretKeyRef": _OF_KEY,
}
ENV: Shape = [{"name!": TEXT, "value": TEXT, "valueFrom": VALUE_FROM}]
ENV_FROM: Shape = [{"configMapRef": _REFERENCE, "prefix": TEXT, "secretRef": _REFERENCE}]

_EXEC: Shape = {"command": [TEXT]}
_HTTP_GET: Shape = {
    "host": TEXT,
    "httpHeaders": [{"name!": TEXT, "value!": TEXT}],
    "path": TEXT,
    "port!": AMOUNT,
    "scheme": TEXT,
}
_TCP: Shape = {"host": TEXT, "port!": AMOUNT}
_PROBE: Shape = {
    "exec": _EXEC,
    "failureThreshold": WHOLE,
    "grpc": {"port!": WHOLE, "service": TEXT},
    "httpGet": _HTTP_GET,
    "initialDelaySeconds": WHOLE,
    "periodSeconds": WHOLE,
    "successThreshold": WHOLE,
    "tcpSocket": _TCP,
    "terminationGracePeriodSeconds": WHOLE,
    "timeoutSeconds": WHOLE,
}
_HOOK: Shape = {"exec": _EXEC, "httpGet": _HTTP_GET, "sleep": {"seconds!": WHOLE}, "tcpSocket": _TCP}

_PROFILE: Shape = {"localhostProfile": TEXT, "type!": TEXT}
_OF_BOTH = {  # Keys of the security contexts of both pods and containers.
    "appArmorProfile": _PROFILE,
    "runAsGroup": WHOLE,
    "runAsNonRoot": FLAG,
    "runAsUser": WHOLE,
    "seLinuxOptions": {"level": TEXT, "role": TEXT, "type": TEXT, "user": TEXT},
    "seccompProfile": _PROFILE,
    "windowsOptions": {
        "gmsaCredentialSpec": TEXT,
        "gmsaCredentialSpecName": TEXT,
        "hostProcess": FLAG,
        "runAsUserName": TEXT,
    },
}
SECURITY: Shape = {
    **_OF_BOTH,
    "allowPrivilegeEscalation": FLAG,
    "capabilities": {"add": [TEXT], "drop": [TEXT]},
    "privileged": FLAG,
    "procMount": TEXT,
    "readOnlyRootFilesystem": FLAG,
}
_POD_SECURITY: Shape = {
    **_OF_BOTH,
    "fsGroup": WHOLE,
    "fsGroupChangePolicy": TEXT,
    "seLinuxChangePolicy": TEXT,
    "supplementalGroups": [WHOLE],
    "supplementalGroupsPolicy": TEXT,
    "sysctls": [{"name!": TEXT, "value!": TEXT}],
}

MOUNTS: Shape = [
    {
        "mountPath!": TEXT,
        "mountPropagation": TEXT,
        "name!": TEXT,
        "readOnly": FLAG,
        "recursiveReadOnly": TEXT,
        "subPath": TEXT,
        "subPathExpr": TEXT,
    }
]

CONTAINER: Shape = {
    "args": [TEXT],
    "command": [TEXT],
    "env": ENV,
    "envFrom": ENV_FROM,
    "image": TEXT,
    "imagePullPolicy": TEXT,
    "lifecycle": {"postStart": _HOOK, "preStop": _HOOK, "stopSignal": TEXT},
    "livenessProbe": _PROBE,
    "name!": TEXT,
    "ports": [{"containerPort!": WHOLE, "hostIP": TEXT, "hostPort": WHOLE, "name": TEXT, "protocol": TEXT}],
    "readinessProbe": _PROBE,
    "resizePolicy": [{"resourceName!": TEXT, "restartPolicy!": TEXT}],
    "resources": RESOURCES,
    "restartPolicy": TEXT,
    "restartPolicyRules": [{"action!": TEXT, "exitCodes": {"operator!": TEXT, "values": [WHOLE]}}],
    "securityContext": SECURITY,
    "startupProbe": _PROBE,
    "stdin": FLAG,
    "stdinOnce": FLAG,
    "terminationMessagePath": TEXT,
    "terminationMessagePolicy": TEXT,
    "tty": FLAG,
    "volumeDevices": [{"devicePath!": TEXT, "name!": TEXT}],
    "volumeMounts": MOUNTS,
    "workingDir": TEXT,
}

_ITEMS: Shape = [{"key!": TEXT, "mode": WHOLE, "path!": TEXT}]
_OTHER_VOLUMES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "downwardAPI", "ephemeral", "fc"),
    *("flexVolume", "flocker", "gcePersistentDisk", "gitRepo", "glusterfs", "iscsi", "photonPersistentDisk"),
    *("portworxVolume", "projected", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
)
_VOLUME: Shape = {
    "configMap": {"defaultMode": WHOLE, "items": _ITEMS, "name": TEXT, "optional": FLAG},
    "csi": {
        "driver!": TEXT,
        "fsType": TEXT,
        "nodePublishSecretRef": {"name": TEXT},
        "readOnly": FLAG,
        "volumeAttributes": TEXTS,
    },
    "emptyDir": {"medium": TEXT, "sizeLimit": AMOUNT},
    "hostPath": {"path!": TEXT, "type": TEXT},
    "image": {"pullPolicy": TEXT, "reference": TEXT},
    "name!": TEXT,
    "nfs": {"path!": TEXT, "readOnly": FLAG, "server!": TEXT},
    "persistentVolumeClaim": {"claimName!": TEXT, "readOnly": FLAG},
    "secret": {"defaultMode": WHOLE, "items": _ITEMS, "optional": FLAG, "secretName": TEXT},
    **dict.fromkeys(_OTHER_VOLUMES, OPEN),
}

SELECTOR: Shape = {"matchExpressions": [{"key!": TEXT, "operator!": TEXT, "values": [TEXT]}], "matchLabels": TEXTS}

POD: Shape = {
    "activeDeadlineSeconds": WHOLE,
    "affinity": {"nodeAffinity": OPEN, "podAffinity": OPEN, "podAntiAffinity": OPEN},
    "automountServiceAccountToken": FLAG,
    "containers!": [CONTAINER],
    "dnsConfig": {"nameservers": [TEXT], "options": [{"name": TEXT, "value": TEXT}], "searches": [TEXT]},
    "dnsPolicy": TEXT,
    "enableServiceLinks": FLAG,
    "ephemeralContainers": OPEN,
    "hostAliases": [{"hostnames": [TEXT], "ip!": TEXT}],
    "hostIPC": FLAG,
    "hostNetwork": FLAG,
    "hostPID": FLAG,
    "hostUsers": FLAG,
    "hostname": TEXT,
    "hostnameOverride": TEXT,
    "imagePullSecrets": [{"name": TEXT}],
    "initContainers": [CONTAINER],
    "nodeName": TEXT,
    "nodeSelector": TEXTS,
    "os": {"name!": TEXT},
    "overhead": AMOUNTS,
    "preemptionPolicy": TEXT,
    "priority": WHOLE,
    "priorityClassName": TEXT,
    "readinessGates": [{"conditionType!": TEXT}],
    "resourceClaims": [{"name!": TEXT, "resourceClaimName": TEXT, "resourceClaimTemplateName": TEXT}],
    "resources": RESOURCES,
    "restartPolicy": TEXT,
    "runtimeClassName": TEXT,
    "schedulerName": TEXT,
    "schedulingGates": [{"name!": TEXT}],
    "schedulingGroup": {"podGroupName": TEXT},
    "securityContext": _POD_SECURITY,
    "serviceAccount": TEXT,
    "serviceAccountName": TEXT,
    "setHostnameAsFQDN": FLAG,
    "shareProcessNamespace": FLAG,
    "subdomain": TEXT,
    "terminationGracePeriodSeconds": WHOLE,
    "tolerations": [{"effect": TEXT, "key": TEXT, "operator": TEXT, "tolerationSeconds": WHOLE, "value": TEXT}],
    "topologySpreadConstraints": [
        {
            "labelSelector": SELECTOR,
            "matchLabelKeys": [TEXT],
            "maxSkew!": WHOLE,
            "minDomains": WHOLE,
            "nodeAffinityPolicy": TEXT,
            "nodeTaintsPolicy": TEXT,
            "topologyKey!": TEXT,
            "whenUnsatisfiable!": TEXT,
        }
    ],
    "volumes": [_VOLUME],
}

POD_TEMPLATE: Shape = {"metadata": METADATA, "spec": POD}

SERVICE: Shape = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": METADATA,
    "spec": {
        "allocateLoadBalancerNodePorts": FLAG,
        "clusterIP": TEXT,
        "clusterIPs": [TEXT],
        "externalIPs": [TEXT],
        "externalName": TEXT,
        "externalTrafficPolicy": TEXT,
        "healthCheckNodePort": WHOLE,
        "internalTrafficPolicy": TEXT,
        "ipFamilies": [TEXT],
        "ipFamilyPolicy": TEXT,
        "loadBalancerClass": TEXT,
        "loadBalancerIP": TEXT,
        "loadBalancerSourceRanges": [TEXT],
        "ports": [
            {
                "appProtocol": TEXT,
                "name": TEXT,
                "nodePort": WHOLE,
                "port!": WHOLE,
                "protocol": TEXT,
                "targetPort": AMOUNT,
            }
        ],
        "publishNotReadyAddresses": FLAG,
        "selector": TEXTS,
        "sessionAffinity": TEXT,
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": WHOLE}},
        "trafficDistribution": TEXT,
        "type": TEXT,
    },
    "status": OPEN,
}
