// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// maxManifestBytes bounds what apply reads.
const maxManifestBytes = 1 << 20

func (a *app) apply(stdin io.Reader) *cobra.Command {
	var output, file string
	var req api.ApplyRequest
	var noWait bool
	var deadline time.Duration
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "follow the changed annotations of running pods",
		Long: "apply reads manifests of Pods (YAML or JSON, several in one file, Lists as `kubectl get pods -o\n" +
			"yaml` prints them; - is standard input) and makes the limits of their containers on this node what\n" +
			"the annotations say now, within node policy, as set would.",
		Example:           "  gpufence apply -f pod.yaml\n  kubectl get pods -n team-a -o yaml | gpufence apply -f -",
		Args:              exactly(0, "no arguments but -f FILE"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usagef("apply wants a manifest: give -f FILE, or -f - for standard input")
			}
			if cmd.Flags().Changed("deadline") && deadline < time.Millisecond {
				return usagef("a deadline of %s is too short: --deadline takes a time such as 5s", deadline)
			}
			text, err := readManifest(file, stdin)
			if err != nil {
				return err
			}
			if req.Pods, err = manifestPods(file, text); err != nil {
				return err
			}
			req.Wait, req.DeadlineMillis = !noWait, deadline.Milliseconds()
			resp, err := a.client().Apply(cmd.Context(), req)
			if err != nil {
				return err
			}
			if output == "json" {
				err = a.printJSON(resp)
			} else {
				err = a.applyTable(resp)
			}
			if err != nil {
				return err
			}
			for _, p := range resp.Pods {
				if p.Error != nil {
					return errSaid
				}
				for _, r := range p.Resizes {
					if r.State == stateFailed {
						return errSaid
					}
				}
			}
			return nil
		},
	}
	outputFlag(cmd, &output, "table", "json")
	f := cmd.Flags()
	f.StringVarP(&file, "filename", "f", "", "manifest, or - for standard input")
	f.BoolVar(&req.Force, "force", false, "kill a container that does not free enough by the deadline")
	f.BoolVar(&noWait, "no-wait", false, "do not wait for the end of pending resizes")
	f.DurationVar(&deadline, "deadline", 0, "how long a shrink may be pending (default: node policy)")
	return cmd
}

func badManifest(format string, args ...any) *quota.Error {
	return quota.NewError(quota.CodeBadManifest, format, args...)
}

func readManifest(file string, stdin io.Reader) ([]byte, error) {
	r := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, badManifest("the manifest cannot be read: %w", err)
		}
		defer f.Close() // only read
		r = f
	}
	text, err := io.ReadAll(io.LimitReader(r, maxManifestBytes+1))
	if err != nil {
		return nil, badManifest("the manifest %s cannot be read: %w", file, err)
	}
	if len(text) > maxManifestBytes {
		return nil, badManifest("the manifest %s is larger than %d MiB", file, maxManifestBytes>>20).WithHint("split it")
	}
	return text, nil
}

// manifest is a Pod, or a List of such.
type manifest struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace   string            `json:"namespace"`
		Name        string            `json:"name"`
		UID         string            `json:"uid"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Items []manifest `json:"items"`
}

// manifestPods are the pods of a file, with the annotations that we read.
func manifestPods(file string, text []byte) ([]api.ApplyPod, error) {
	var out []api.ApplyPod
	seen := map[string]bool{}
	for i, doc := range documents(text) {
		if len(bytes.TrimSpace(doc)) == 0 {
			continue
		}
		var m manifest
		if err := yaml.Unmarshal(doc, &m); err != nil {
			return nil, badManifest("document %d of %s is not a manifest: %w", i+1, file, err)
		}
		if m.Kind == "" && m.Metadata.Name == "" && m.Items == nil {
			continue // only comments
		}
		list := []manifest{m}
		if m.Kind == "List" || m.Kind == "PodList" {
			list = m.Items
		}
		for _, p := range list {
			if p.Kind == "" && m.Kind == "PodList" {
				p.Kind = "Pod"
			}
			if p.Kind != "Pod" {
				return nil, badManifest("document %d of %s is a %.60q, not a Pod", i+1, file, p.Kind).WithHint("give it the pods: kubectl get pods -o yaml | gpufence apply -f -")
			}
			if p.Metadata.Name == "" {
				return nil, badManifest("a Pod in document %d of %s has no name", i+1, file)
			}
			pod := api.ApplyPod{Namespace: p.Metadata.Namespace, Name: p.Metadata.Name, UID: p.Metadata.UID, Annotations: map[string]string{}}
			if pod.Namespace == "" {
				pod.Namespace = "default"
			}
			for k, v := range p.Metadata.Annotations {
				if quota.Ours(k) {
					pod.Annotations[k] = v
				}
			}
			if name := pod.Namespace + "/" + pod.Name; seen[name] {
				return nil, badManifest("%s has the Pod %.200s twice", file, name)
			} else if seen[name] = true; len(pod.Annotations) > 0 {
				out = append(out, pod)
			}
		}
	}
	if len(out) == 0 {
		return nil, badManifest("no Pod in %s has an annotation gpufence.dev/...", file)
	}
	return out, nil
}

// documents splits a YAML stream.
func documents(text []byte) [][]byte {
	var out [][]byte
	var doc []byte
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(line, []byte("---")) && len(bytes.TrimRight(line, " \t\r\n")) == 3 {
			out = append(out, doc)
			doc = nil
			continue
		}
		doc = append(doc, line...)
	}
	return append(out, doc)
}

func (a *app) applyTable(resp api.ApplyResponse) error {
	t := newTable(a.stdout, "NAMESPACE", "POD", "CONTAINER", "KEY", "GPU", "DESIRED", "ACTUAL", "STATE", "WHY")
	for _, p := range resp.Pods {
		for _, n := range p.Notices {
			fmt.Fprintf(a.stderr, "gpufence: note: %s/%s: %s\n", printable(p.Namespace), printable(p.Name), printable(n))
		}
		switch {
		case p.Error != nil:
			t.row(p.Namespace, p.Name, "", "", "", "", "", "refused", p.Error.Error())
		case len(p.Resizes) == 0:
			t.row(p.Namespace, p.Name, "", "", "", "", "", "unchanged", "")
		}
		for _, r := range p.Resizes {
			t.row(p.Namespace, p.Name, r.Container, keyOf(r.Resize), r.GPU, valueOf(r.Resize, r.Desired), valueOf(r.Resize, r.Actual), r.State, r.Why)
		}
	}
	return t.flush()
}
