// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/documented"
)

// docs runs the commands about clusters as they stand, page after page. The chart that the other steps had goes first, so
// that Helm installs it.
func docs(ctx context.Context, t *testing.T, c *cluster) {
	if !c.agent {
		skip(t, "gpufence-agent is not built")
	}
	var all []string
	for _, d := range c.chart {
		all = append(all, d.text)
	}
	_, err := c.kubectl(ctx, strings.Join(all, "\n---\n"), "delete", "--ignore-not-found", "-f", "-")
	must(t, err)
	must(t, c.unlabel(ctx))
	bin := c.path("docs-bin")
	must(t, os.MkdirAll(bin, 0o755))
	for _, program := range []string{"kubectl", "helm"} {
		must(t, os.Symlink(c.bins[program], filepath.Join(bin, program)))
	}
	c.env = []string{
		"PATH=" + bin + ":" + filepath.Join(c.dist, "bin") + ":" + os.Getenv("PATH"), "KUBECONFIG=" + c.path("admin.kubeconfig"), "GPUFENCE_SOCKET=" + c.memPath("gpufence/gpufenced.sock"),
		"HELM_CACHE_HOME=" + c.path("helm"), "HELM_CONFIG_HOME=" + c.path("helm"), "HELM_DATA_HOME=" + c.path("helm"),
	}
	documented.Run(t, "tests/k8s", func(t *testing.T, page string) func(string) error {
		switch page {
		case "docs/install.md":
			return func(command string) error { return c.fromBundle(ctx, command) }
		case "docs/kubernetes.md":
			return func(command string) error { return c.fromPage(ctx, command) }
		case "docs/resizing.md":
			return func(command string) error { return c.fromManifest(ctx, command) }
		}
		t.Fatalf("nothing is known of %s", page)
		return nil
	})
}

func (c *cluster) unlabel(ctx context.Context) error {
	_, err := c.kubectl(ctx, "", "label", "nodes", "--all", "gpufence.dev/ready-")
	return err
}

// shell runs a line in the folder of the repository, where what is typed there is.
func (c *cluster) shell(ctx context.Context, line string) (string, error) {
	out, err := run(ctx, "", "env", append(append([]string{"-C", documented.Root}, c.env...), "bash", "-c", line)...)
	if err == nil && strings.TrimSpace(out) == "" {
		err = errors.New("it printed nothing")
	}
	return out, err
}

// helmInstall adds where things are on this node, and waits for what the chart is for.
func (c *cluster) helmInstall(ctx context.Context, command string) error {
	if _, err := c.shell(ctx, command+" "+strings.Join(c.places(), " ")); err != nil {
		return err
	}
	return c.awaitAgent(ctx)
}

// fromBundle installs the packed chart, and removes it again.
func (c *cluster) fromBundle(ctx context.Context, command string) error {
	const version = "0.0.1"
	if _, err := c.shell(ctx, "helm package packaging/helm/gpufence --version "+version+" --destination "+c.path("docs-bin")); err != nil {
		return err
	}
	if err := c.helmInstall(ctx, strings.Replace(command, "gpufence-VERSION.tgz", c.path("docs-bin/gpufence-"+version+".tgz"), 1)); err != nil {
		return err
	}
	_, err := c.shell(ctx, "helm uninstall gpufence --wait --namespace "+agentNamespace)
	return errors.Join(err, c.unlabel(ctx))
}

func (c *cluster) fromPage(ctx context.Context, command string) error {
	switch {
	case strings.HasPrefix(command, "helm install"):
		if err := c.helmInstall(ctx, command); err != nil {
			return err
		}
		// A pod with something to look at.
		if _, err := c.kubectl(ctx, "", "create", "namespace", "team-a"); err != nil {
			return err
		}
		text, err := one("web", "2Gi", "/clients/bypass", "128", "100").manifest()
		if err == nil {
			_, err = c.kubectl(ctx, strings.Replace(text, `"namespace":"default"`, `"namespace":"team-a"`, 1), "apply", "-f", "-")
		}
		return err
	case strings.HasPrefix(command, "kubectl apply"):
		// It would be the chart once more, with its own image and places: the API server judges it.
		command += " --dry-run=server"
	case strings.HasPrefix(command, "gpufence lint"):
		// Of what is right it says nothing.
		command = strings.Replace(command, "pod.yaml", "packaging/kubernetes/examples/pod.yaml", 1) + " && echo right"
	case strings.HasPrefix(command, "kubectl gpufence"):
		// The pod is killed, and starts again, meanwhile.
		return until(ctx, command+" answers", func(ctx context.Context) (bool, string) {
			out, err := c.shell(ctx, command)
			return err == nil && strings.Contains(out, "web"), fmt.Sprint(out, err)
		})
	case strings.HasPrefix(command, "helm uninstall"):
		if _, err := c.kubectl(ctx, "", "delete", "namespace", "team-a"); err != nil {
			return err
		}
	}
	_, err := c.shell(ctx, command)
	return err
}

// fromManifest changes a limit without the agent: by what the pod's manifest says now.
func (c *cluster) fromManifest(ctx context.Context, command string) error {
	const class = "gpufence-anywhere"
	if _, err := c.kubectl(ctx, `{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"`+class+`"},"handler":"`+handler+`"}`, "apply", "-f", "-"); err != nil {
		return err
	}
	p := filled("notebook", "2Gi")
	p.class = class
	if err := c.begin(ctx, p); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "", "annotate", "--overwrite", "pod", "notebook", "gpufence.dev/memory.max=3Gi"); err != nil {
		return err
	}
	if _, err := c.shell(ctx, command); err != nil {
		return err
	}
	_, err := c.awaitView(ctx, "notebook", "main", "its limit is 3Gi", func(v api.Container) bool { return len(v.GPUs) == 1 && v.GPUs[0].Limits.Max == 3*gib })
	return err
}
