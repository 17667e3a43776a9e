{{- define "spillway.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "spillway.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "spillway.fullname" .) -}}
{{- end -}}

{{- define "spillway.tlsSecret" -}}
{{- .Values.progress.tls.secretName | default (printf "%s-progress-tls" (include "spillway.fullname" .)) -}}
{{- end -}}

{{/* Of cluster-scoped objects: two releases in two namespaces may have the same name. */}}
{{- define "spillway.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "spillway.fullname" .) -}}
{{- end -}}

{{- define "spillway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "spillway.nodeExporterSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-node-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "spillway.labels" -}}
{{ include "spillway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Call with a list: values of an image, and the root. */}}
{{- define "spillway.image" -}}
{{- $image := first . -}}
{{- $root := last . -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* int64: Helm reads numbers as floats, and would print large ones as 1e+09. */}}
{{- define "spillway.podSecurity" -}}
runAsNonRoot: true
{{- range $field, $id := .Values.podSecurity }}
{{- if ne $id nil }}
{{ $field }}: {{ int64 $id }}
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
