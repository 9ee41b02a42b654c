{{- /* A pod of a server; with (dict "root" ROOT "role" ROLE "values" VALUES "leader" BOOL). */ -}}
{{- define "pdserve.serverSpec" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $ranks := mul $values.tpSize $values.ppSize -}}
{{- if mod $ranks $values.groupSize }}{{ fail (printf "%s: tpSize * ppSize = %d is not divisible by groupSize = %d" .role $ranks (int $values.groupSize)) }}{{ end -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 120 # requests get 60 s, peers 12 s, the scheduler up to 15 s
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- if $root.Values.rdma.enabled }}
  runAsUser: 0
  runAsGroup: 0
  {{- else }}
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
tolerations:
  {{- if eq $root.Values.device "cuda" }}
  - {key: {{ $root.Values.gpuResource }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with $values.tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
affinity:
  podAntiAffinity: # keeps servers on different hosts if possible; a preference, so that one host suffices
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchExpressions: {{ include "pdserve.serverExpressions" $root | nindent 14 }}
volumes:
  - name: cache
    emptyDir: {sizeLimit: {{ $values.cacheSize }}}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
  {{- with $root.Values.model.claim }}
  - name: models
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
  {{- end }}
containers:
  - name: server
    image: {{ include "pdserve.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, pdserve.launch_server]
    args:
      - --model-path={{ $root.Values.model.path }}
      - --served-model-name={{ $root.Values.model.servedName }}
      - --dtype={{ $root.Values.model.dtype }}
      - --page-size={{ $root.Values.model.pageSize }}
      - --device={{ $root.Values.device }}
      - --host=0.0.0.0
      - --port=30000
      - --timeout-graceful-shutdown=60
      - --tp-size={{ $values.tpSize }}
      - --pp-size={{ $values.ppSize }}
      {{- if ne .role "monolith" }}
      - --disaggregation-mode={{ .role }}
      - --disaggregation-host=$(POD_IP)
      - --disaggregation-transfer-backend={{ $root.Values.transferBackend }}
      {{- if $root.Values.rdma.enabled }}
      - --disaggregation-ib-device={{ $root.Values.rdma.devices }}
      {{- end }}
      {{- end }}
      {{- if eq .role "prefill" }}
      - --disaggregation-bootstrap-port=8998
      {{- end }}
      {{- if gt (int $values.groupSize) 1 }}
      - --nnodes=$(LWS_GROUP_SIZE)
      - --node-rank=$(LWS_WORKER_INDEX)
      - --dist-init-addr=$(LWS_LEADER_ADDRESS):20000
      {{- end }}
      {{- with $values.args }}{{ toYaml . | nindent 6 }}{{ end }}
    env:
      - name: POD_IP
        valueFrom:
          fieldRef: {fieldPath: status.podIP}
      - name: PDSERVE_CONTROL_TOKEN # without the secret the pod does not start
        valueFrom:
          secretKeyRef: {name: {{ $root.Values.secrets.controlToken }}, key: PDSERVE_CONTROL_TOKEN}
      {{- include "pdserve.apiKeys" $root | nindent 6 }}
      - {name: PDSERVE_CACHE, value: /var/cache/pdserve}
      - {name: HOME, value: /var/cache/pdserve}
      - {name: HF_HUB_OFFLINE, value: {{ ternary "1" "0" $root.Values.model.hubOffline | quote }}}
      - {name: OMP_NUM_THREADS, value: {{ $values.ompNumThreads | quote }}}
      {{- with $values.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- $limits := dict }}
    {{- if eq $root.Values.device "cuda" }}
    {{- $_ := set $limits $root.Values.gpuResource (div $ranks $values.groupSize | toString) }}
    {{- end }}
    {{- if $root.Values.rdma.enabled }}
    {{- $_ := set $limits $root.Values.rdma.resource ($root.Values.rdma.count | toString) }}
    {{- end }}
    resources: {{ toYaml (mergeOverwrite (deepCopy $values.resources) (dict "limits" $limits)) | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
        {{- if $root.Values.rdma.enabled }}
        add: [IPC_LOCK]
        {{- end }}
    volumeMounts:
      - {name: cache, mountPath: /var/cache/pdserve}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- if $root.Values.model.claim }}
      - {name: models, mountPath: {{ $root.Values.model.mountPath }}, readOnly: true}
      {{- end }}
    {{- if .leader }}
    ports:
      - {name: http, containerPort: 30000}
      {{- if eq .role "prefill" }}
      - {name: bootstrap, containerPort: 8998}
      {{- end }}
    startupProbe: # computes a token once weights and kernels are loaded: up to 30 minutes
      httpGet: {path: /health_generate, port: http}
      periodSeconds: 10
      timeoutSeconds: 25 # the server's own timeout is 20 s
      failureThreshold: 180
    readinessProbe: # requests are accepted, and a partner answers if any is known
      httpGet: {path: /ready, port: http}
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: 2
    livenessProbe: # never /health_generate: a busy server would be killed for being busy
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    {{- end }}
{{- end }}

{{- /* A pod template; with the same arguments. The label pdserve/http marks the pods that have an HTTP server. */ -}}
{{- define "pdserve.serverTemplate" -}}
metadata:
  labels:
    {{- include "pdserve.selector" (list .root .role) | nindent 4 }}
    {{- if .leader }}
    pdserve/http: "true"
    {{- end }}
    {{- with .values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .values.podAnnotations }}
  annotations: {{ toYaml . | nindent 4 }}
  {{- end }}
spec: {{ include "pdserve.serverSpec" . | nindent 2 }}
{{- end }}
