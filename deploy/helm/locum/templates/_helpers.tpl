{{- define "locum.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "locum.selector" -}}
app.kubernetes.io/name: locum
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "locum.labels" -}}
{{ include "locum.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "locum.image" -}}
{{- include "locum.reference" (dict "image" .Values.image "version" .Chart.AppVersion) -}}
{{- end }}

{{/* Of the API: what serves on a CPU, where it has an image of its own. */}}
{{- define "locum.apiImage" -}}
{{- if and .Values.api.image.repository (not .Values.api.resourceName) -}}
{{- include "locum.reference" (dict "image" .Values.api.image "version" .Chart.AppVersion) -}}
{{- else -}}
{{- include "locum.image" . -}}
{{- end -}}
{{- end }}

{{- define "locum.reference" -}}
{{- $version := .version -}}
{{- with .image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $version }}{{- end -}}
{{- end -}}
{{- end }}

{{/* Of every pod: no credential of the cluster, no root. */}}
{{- define "locum.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "locum.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of every container. */}}
{{- define "locum.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
envFrom:
  - configMapRef: {name: {{ include "locum.name" . }}}
  {{- if not .Values.demo }}
  - secretRef: {name: {{ .Values.secret }}}
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: state, mountPath: /var/lib/locum/state}
  - {name: cache, mountPath: /var/lib/locum/cache}
{{- end }}

{{/* A Deployment of workers: (dict "root" $ "part" NAME "settings" values "device" DEVICE). */}}
{{- define "locum.worker" -}}
{{- $root := .root -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "locum.name" $root }}-{{ .part }}
  labels:
    {{- include "locum.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .part }}
spec:
  replicas: {{ .settings.replicas }}
  {{- if .settings.resourceName }}
  # A new pod would wait for the device that the old one holds.
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels:
      {{- include "locum.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .part }}
  template:
    metadata:
      labels:
        {{- include "locum.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .part }}
      annotations:
        locum/settings: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum }}
    spec:
      {{- include "locum.pod" $root | nindent 6 }}
      {{- with .settings.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: {{ .settings.gracePeriodSeconds }}
      {{- include "locum.scheduling" .settings | nindent 6 }}
      containers:
        - name: worker
          image: {{ include "locum.image" $root }}
          {{- include "locum.container" $root | nindent 10 }}
          # A worker that hangs loses its job when its lease ends; there is no port to probe.
          command: [celery, --quiet, -A, service.worker, worker, --loglevel, WARNING]
          env:
            - {name: LOCUM_DEVICE, value: {{ .device }}}
          resources:
            {{- $resources := deepCopy .settings.resources }}
            {{- with .settings.resourceName }}
            {{- $resources = mustMergeOverwrite $resources (dict "limits" (dict . 1)) }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
      volumes:
        - {name: tmp, emptyDir: {}}
        - {name: state, emptyDir: {}}
        - {name: cache, emptyDir: {sizeLimit: {{ .settings.cacheSize }}}}
{{- end }}
