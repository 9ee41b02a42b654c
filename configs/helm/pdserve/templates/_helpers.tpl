{{- define "pdserve.fullname" -}}
{{- if eq .Release.Name .Chart.Name }}{{ .Chart.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* Labels of everything; with (list ROOT COMPONENT). */ -}}
{{- define "pdserve.labels" -}}
{{- $root := index . 0 -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- /* Labels that select pods; with (list ROOT COMPONENT). */ -}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "pdserve.roles" -}}
{{ if eq .Values.mode "pd" }}prefill decode{{ else }}monolith{{ end }}
{{- end }}

{{- define "pdserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Environment from Secrets that servers and router share. */ -}}
{{- define "pdserve.apiKeys" -}}
- name: PDSERVE_API_KEY # what clients must send; optional, see docs/security.md
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.apiKeys }}, key: PDSERVE_API_KEY, optional: true}
- name: PDSERVE_ADMIN_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.apiKeys }}, key: PDSERVE_ADMIN_API_KEY, optional: true}
{{- end }}

{{- /* Selector of the servers of all roles, for policies; with ROOT. */ -}}
{{- define "pdserve.serverExpressions" -}}
- {key: app.kubernetes.io/name, operator: In, values: [pdserve]}
- {key: app.kubernetes.io/instance, operator: In, values: [{{ .Release.Name }}]}
- {key: app.kubernetes.io/component, operator: In, values: [prefill, decode, monolith]}
{{- end }}
