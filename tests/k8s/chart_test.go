// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpufence/gpufence/tests/ociimage"
)

const (
	agentImage     = "localhost/gpufence:e2e"
	agentNamespace = "gpufence"
)

// document is one object of a rendered chart.
type document struct {
	kind, name, text string
}

// places are the chart's values that say where things are on this node.
func (c *cluster) places() []string {
	return []string{
		"--set", "image.repository=localhost/gpufence,image.tag=e2e,image.pullPolicy=Never",
		// There is no systemd: the test has done what the container host does with it.
		"--set", "host.install=false,host.installDir=" + c.path("opt") + ",host.config=" + c.path("config.toml"),
		"--set", "paths.run=" + c.memPath("gpufence") + ",paths.state=" + c.path("agent"),
	}
}

// render is what Helm makes of the chart.
func (c *cluster) render(ctx context.Context, values ...string) ([]document, error) {
	args := append([]string{"template", "gpufence", "../../packaging/helm/gpufence", "--namespace", agentNamespace}, c.places()...)
	for _, v := range values {
		args = append(args, "--set", v)
	}
	out, err := run(ctx, "", c.bins["helm"], args...)
	if err != nil {
		return nil, err
	}
	var all []document
	for _, text := range strings.Split(out, "\n---\n") {
		d := document{text: text}
		metadata := false
		for line := range strings.Lines(text) {
			switch {
			case strings.HasPrefix(line, "kind:"):
				d.kind = strings.TrimSpace(strings.TrimPrefix(line, "kind:"))
			case strings.HasPrefix(line, "metadata:"):
				metadata = true
			case metadata && d.name == "" && strings.HasPrefix(line, "  name:"):
				d.name = strings.TrimSpace(strings.TrimPrefix(line, "  name:"))
			}
		}
		if d.kind != "" {
			all = append(all, d)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("render the chart: nothing came of it")
	}
	return all, nil
}

// put applies the objects of a chart that are wanted.
func (c *cluster) put(ctx context.Context, all []document, wanted func(document) bool) error {
	var texts []string
	for _, d := range all {
		if wanted(d) {
			texts = append(texts, d.text)
		}
	}
	_, err := c.kubectl(ctx, strings.Join(texts, "\n---\n"), "apply", "-f", "-")
	return err
}

// policies are the objects that look at what somebody applies.
func policies(d document) bool { return strings.Contains(d.kind, "AdmissionPolicy") }

// startChart applies what `helm install` would, and waits for the agent.
func (c *cluster) startChart(ctx context.Context) error {
	all, err := c.render(ctx)
	if err != nil {
		return err
	}
	c.chart = all
	c.agent = slices.ContainsFunc([]string{"gpufence-agent"}, func(name string) bool {
		_, err := os.Stat(filepath.Join(c.dist, "bin", name))
		return err == nil
	})
	if _, err := c.kubectl(ctx, "", "label", "node", nodeName, "nvidia.com/gpu.present=true"); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "", "create", "namespace", agentNamespace); err != nil {
		return err
	}
	if !c.agent {
		// Nobody else says that the node is ready.
		if _, err := c.kubectl(ctx, "", "label", "node", nodeName, "gpufence.dev/ready=true"); err != nil {
			return err
		}
		return c.put(ctx, all, func(d document) bool { return d.kind != "DaemonSet" && !policies(d) })
	}
	image := ociimage.Image{Name: agentImage, Entrypoint: []string{"/usr/bin/gpufence-agent"}, Files: map[string]ociimage.File{
		"/usr/bin/gpufence-agent":    {Host: filepath.Join(c.dist, "bin/gpufence-agent")},
		"/opt/gpufence/bin/gpufence": {Host: filepath.Join(c.dist, "bin/gpufence")}, // for kubectl gpufence
	}}
	if err := c.load(ctx, image); err != nil {
		return err
	}
	if err := c.put(ctx, all, func(d document) bool { return !policies(d) }); err != nil {
		return err
	}
	if err := c.canary(ctx); err != nil {
		return err
	}
	return c.awaitAgent(ctx)
}

func (c *cluster) awaitAgent(ctx context.Context) error {
	return until(ctx, "the agent says that the node is ready", func(ctx context.Context) (bool, string) {
		out, err := c.kubectl(ctx, "", "get", "node", nodeName, "-o", `jsonpath={.metadata.labels.gpufence\.dev/ready}`)
		logs, _ := c.kubectl(ctx, "", "logs", "-n", agentNamespace, "daemonset/gpufence-agent", "--all-containers", "--tail=8")
		return err == nil && out == "true", fmt.Sprintf("%q %v\n%s", out, err, logs)
	})
}
