{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "gpufence.labels" -}}
app.kubernetes.io/name: gpufence
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "gpufence.selector" -}}
app.kubernetes.io/name: gpufence
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: agent
{{- end }}

{{- define "gpufence.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The classes whose pods are fenced, as a list of CEL. */}}
{{- define "gpufence.classes" -}}
[{{ range $i, $c := concat (list .Values.runtimeClass.name .Values.runtimeClass.hardName) .Values.runtimeClass.also }}{{ if $i }}, {{ end }}'{{ $c }}'{{ end }}]
{{- end }}

{{/* One amount as a user writes it, and what a per-GPU list is made of. The grammar is that of
enforcer/quota; tests/kubernetes compares the two. */}}
{{- define "gpufence.amount" -}}
([+]?([0-9]+[.]?[0-9]*|[.][0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)|[+]?(0+[.]?0*|[.]0+)|max|0*(100([.]0*)?|[0-9]{1,2}([.][0-9]*)?|[.][0-9]+)\s*%)
{{- end }}
{{- define "gpufence.uuid" -}}
(GPU-|MIG-(GPU-)?)[0-9a-fA-F/-]{1,64}
{{- end }}

{{/* What the checks of a pod are made of. Takes a dict: pod is the CEL of the pod or the template. */}}
{{- define "gpufence.variables" -}}
- name: annotations
  expression: {{ .pod }}.?metadata.?annotations.orValue({})
- name: names # of our annotations, without the domain
  expression: variables.annotations.filter(k, k.startsWith('gpufence.dev/') && !k.startsWith('gpufence.dev/x-')).map(k, k.substring(13))
- name: containers
  expression: >-
    {{ .pod }}.spec.containers.map(c, c.name) +
    {{ .pod }}.spec.?initContainers.orValue([]).map(c, c.name) +
    {{ .pod }}.spec.?ephemeralContainers.orValue([]).map(c, c.name)
- name: status
  expression: variables.names.filter(n, n == 'status' || n.startsWith('status.'))
- name: unknown
  expression: >-
    variables.names.filter(n, n != 'status' && !n.startsWith('status.') &&
    !n.matches('^(config|(container[.][^.]+[.])?(memory[.](max|min|high|swap[.]max|oom[.]group)|compute[.](weight|max)|require|gpu))$'))
- name: strangers
  expression: variables.names.filter(n, n.startsWith('container.') && !(n.split('.')[1] in variables.containers))
- name: long
  expression: >-
    variables.names.filter(n, size(variables.annotations['gpufence.dev/' + n]) > (n == 'config' ? 65536 : 4096))
- name: amounts
  expression: variables.names.filter(n, n.matches('^(container[.][^.]+[.])?memory[.](max|min|high|swap[.]max)$') && !(n in variables.long))
- name: badAmounts
  expression: >-
    variables.amounts.filter(n, !variables.annotations['gpufence.dev/' + n].matches(
    r'^\s*({{ include "gpufence.amount" . }}|{{ include "gpufence.uuid" . }}\s*=\s*{{ include "gpufence.amount" . }}(\s*,\s*{{ include "gpufence.uuid" . }}\s*=\s*{{ include "gpufence.amount" . }})*)\s*$'))
- name: twice # a GPU that one list names twice
  expression: >-
    variables.amounts.filter(n, variables.annotations['gpufence.dev/' + n].contains(',') &&
    [variables.annotations['gpufence.dev/' + n].split(',').map(i, i.split('=')[0].trim().lowerAscii())]
    .exists(ids, ids.exists(id, ids.filter(other, other == id).size() > 1)))
- name: badWords
  expression: >-
    variables.names.filter(n, !(n in variables.long) && (
    (n.matches('(^|[.])memory[.]oom[.]group$') && !(variables.annotations['gpufence.dev/' + n].trim() in ['true', 'false'])) ||
    (n.matches('^(container[.][^.]+[.])?require$') && !(variables.annotations['gpufence.dev/' + n].trim() in ['hard', 'reactive'])) ||
    (n.matches('(^|[.])compute[.]weight$') && !variables.annotations['gpufence.dev/' + n].matches(r'^\s*0*([1-9][0-9]{0,3}|10000)\s*$')) ||
    (n.matches('(^|[.])compute[.]max$') && (!variables.annotations['gpufence.dev/' + n].matches(
    r'^\s*0*(100([.]0*)?|[0-9]{1,2}([.][0-9]*)?|[.][0-9]+)\s*%\s*$') || !variables.annotations['gpufence.dev/' + n].matches('[1-9]'))) ||
    (n.matches('^(container[.][^.]+[.])?gpu$') && !variables.annotations['gpufence.dev/' + n].matches(
    r'^\s*(any|all|[1-9][0-9]?|1[01][0-9]|12[0-7]|{{ include "gpufence.uuid" . }}(\s*,\s*{{ include "gpufence.uuid" . }})*)\s*$'))))
{{- if .ceiling }}
- name: maxima # the amounts of every memory.max, without the GPUs of lists
  expression: >-
    variables.amounts.filter(n, n.matches('(^|[.])memory[.]max$') && !n.endsWith('swap.max') && !(n in variables.badAmounts))
- name: above
  expression: >-
    variables.maxima.filter(n, variables.annotations['gpufence.dev/' + n].split(',').map(i, i.contains('=') ? i.split('=')[1].trim() : i.trim())
    .exists(i, i.matches('[0-9]') && isQuantity(i) && quantity(i).isGreaterThan(quantity('{{ .ceiling }}'))))
- name: unlimited # as on the node: max is refused where nothing else bounds the container
  expression: >-
    size(variables.maxima) > 0 && variables.maxima.all(n, variables.annotations['gpufence.dev/' + n].split(',')
    .all(i, (i.contains('=') ? i.split('=')[1].trim() : i.trim()) == 'max'))
{{- end }}
{{- end }}

{{- define "gpufence.validations" -}}
- expression: size(variables.status) == 0
  messageExpression: "'gpufence: E1304 gpufence.dev/' + variables.status[0] + ' cannot be set, it is where gpufence reports: remove it'"
- expression: size(variables.unknown) == 0
  messageExpression: >-
    'gpufence: E1301 gpufence.dev/' + variables.unknown[0] + ' is not a key of gpufence: the keys are memory.max, memory.min, memory.high, memory.swap.max, ' +
    'memory.oom.group, compute.weight, compute.max, require, gpu and config, and container.<name>.<key> for one container'
- expression: size(variables.strangers) == 0
  messageExpression: >-
    'gpufence: E1312 gpufence.dev/' + variables.strangers[0] + ' names a container that the pod does not have: its containers are ' + variables.containers.join(', ')
- expression: size(variables.long) == 0
  messageExpression: "'gpufence: E1206 gpufence.dev/' + variables.long[0] + ' has more characters than a value can have'"
- expression: size(variables.badAmounts) == 0
  messageExpression: >-
    [variables.annotations['gpufence.dev/' + variables.badAmounts[0]].trim()].map(v, 'gpufence: ' + (
    v.matches('^[0-9]{1,7}$') ? 'E1203 ' + variables.badAmounts[0] + ' "' + v + '" has no unit: write ' + v + 'Mi' :
    v.matches('^[0-9.]+(e[0-9]+)?$') ? 'E1203 ' + variables.badAmounts[0] + ' "' + v + '" has no unit: write a quantity such as 4Gi' :
    v.matches('^[0-9.]+[mgtp]$') ? 'E1202 ' + variables.badAmounts[0] + ' "' + v + '" has an unknown unit: write ' + v.upperAscii() + 'i' :
    v.startsWith('-') ? 'E1205 ' + variables.badAmounts[0] + ' "' + v + '" is negative: write a quantity such as 4Gi' :
    v.matches(r'^\s*[0-9]+\s*=') ? 'E1209 ' + variables.badAmounts[0] + ' names a GPU by position, which means nothing under Kubernetes: write one amount for all GPUs, or UUIDs such as GPU-<uuid>=4Gi' :
    'E1201 ' + variables.badAmounts[0] + ' "' + (size(v) > 40 ? v.substring(0, 40) + '…' : v) + '" is not an amount: write one such as 4Gi, 25% or max'))[0]
- expression: size(variables.twice) == 0
  messageExpression: "'gpufence: E1208 ' + variables.twice[0] + ' names a GPU twice: name it once'"
- expression: size(variables.badWords) == 0
  messageExpression: >-
    'gpufence: ' + (variables.badWords[0].endsWith('oom.group') ? 'E1215 ' + variables.badWords[0] + ' is neither true nor false: write true or false' :
    variables.badWords[0].endsWith('require') ? 'E1216 ' + variables.badWords[0] + ' is not a level that can be required: write hard or reactive' :
    variables.badWords[0].endsWith('weight') ? 'E1201 ' + variables.badWords[0] + ' is not a weight: write a number from 1 to 10000' :
    variables.badWords[0].endsWith('compute.max') ? 'E1207 ' + variables.badWords[0] + ' is not a share of GPU time: write one such as 30%' :
    'E1217 ' + variables.badWords[0] + ' names no GPU: write any, a count such as 2, all, or UUIDs such as GPU-<uuid>')
{{- if .ceiling }}
- expression: size(variables.above) == 0
  messageExpression: >-
    'gpufence: E1213 ' + variables.above[0] + ' ' + variables.annotations['gpufence.dev/' + variables.above[0]].trim() + ' is above the ceiling of {{ .ceiling }} that this cluster sets: write at most that'
- expression: "!variables.unlimited"
  messageExpression: >-
    'gpufence: E1405 ' + variables.maxima[0] + ' "max" is above the ceiling of {{ .ceiling }} that this cluster sets: write at most that'
{{- end }}
{{- end }}

{{/* A pod that asks for a GPU: a resource of NVIDIA's, a claim of a device class of theirs is not seen here. */}}
{{- define "gpufence.wantsGPU" -}}
- name: wants-gpu
  expression: >-
    object.metadata.?annotations.orValue({}).exists(k, k.startsWith('gpufence.dev/')) ||
    (object.spec.containers + object.spec.?initContainers.orValue([])).exists(c,
    c.?resources.?limits.orValue({}).exists(r, r.startsWith('nvidia.com/')))
{{- end }}

{{/* The namespaces of the modes namespace and cluster. */}}
{{- define "gpufence.namespaces" -}}
namespaceSelector:
  matchExpressions:
{{- if eq .Values.mode "namespace" }}
    - { key: {{ .Values.namespaceLabel }}, operator: In, values: ["true"] }
{{- end }}
    - { key: kubernetes.io/metadata.name, operator: NotIn, values: {{ append .Values.excludedNamespaces .Release.Namespace | toJson }} }
{{- end }}
