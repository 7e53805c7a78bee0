// SPDX-License-Identifier: Apache-2.0

// Package plugin is the command line of `kubectl gpufence`.
//
// It promises: nothing but kubectl is asked; what follows the command goes to gpufence on the node as
// it is; the exit status is kubectl's, which is that of gpufence there.
package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/cmd/internal/man"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

const (
	daemonSet = "app.kubernetes.io/name=gpufence,app.kubernetes.io/component=agent"
	container = "agent"
	// program is where the image has gpufence.
	program = "gpufence"
)

type plugin struct {
	getenv         func(string) string
	stdin          io.Reader
	stdout, stderr io.Writer

	kubectl   string
	global    []string // for kubectl
	namespace string   // of the pod
	ours      string   // of the DaemonSet
	node      string
	allNodes  bool
}

// Run executes one command line and returns the exit status.
func Run(ctx context.Context, args []string, getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
	p := &plugin{getenv: getenv, stdin: stdin, stdout: stdout, stderr: stderr}
	root := p.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode() // said by whoever it was
	}
	fmt.Fprintln(stderr, "gpufence:", strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "gpufence: ")), " "))
	if errors.Is(err, quota.CodeUsage) {
		return 2
	}
	return 1
}

func usagef(format string, args ...any) error {
	return quota.NewError(quota.CodeUsage, format, args...)
}

func (p *plugin) root() *cobra.Command {
	root := &cobra.Command{
		Use: "kubectl-gpufence", Short: "ask gpufence on the node of a pod", Version: api.BuildVersion,
		Long: "kubectl gpufence finds the node of a pod and runs gpufence there, in the pod of the DaemonSet\n" +
			"gpufence-agent, through kubectl exec. It needs the right to do that.",
		SilenceErrors: true, SilenceUsage: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return usagef("there is no command %q: see `kubectl gpufence --help`", args[0])
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetOut(p.stdout)
	root.SetErr(p.stderr)
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%s: see `%s --help`", err, cmd.CommandPath())
	})
	f := root.PersistentFlags()
	f.StringVarP(&p.namespace, "namespace", "n", "", "namespace of the pod (default: kubectl's)")
	f.StringVar(&p.ours, "gpufence-namespace", "gpufence", "namespace of the DaemonSet")
	kubectl := p.getenv("GPUFENCE_KUBECTL")
	if kubectl == "" {
		kubectl = "kubectl"
	}
	f.StringVar(&p.kubectl, "kubectl", kubectl, "the kubectl to run; GPUFENCE_KUBECTL also names it")
	var kubeconfig, contextName string
	f.StringVar(&kubeconfig, "kubeconfig", "", "handed to kubectl")
	f.StringVar(&contextName, "context", "", "handed to kubectl")
	root.PersistentPreRun = func(*cobra.Command, []string) {
		if kubeconfig != "" {
			p.global = append(p.global, "--kubeconfig="+kubeconfig)
		}
		if contextName != "" {
			p.global = append(p.global, "--context="+contextName)
		}
	}
	root.AddCommand(p.ps(), p.about("why", "say why a container of a pod was killed or refused"), p.about("inspect", "show the limits, fences and numbers of a container of a pod"),
		man.Command(root, api.BuildVersion))
	return root
}

func (p *plugin) ps() *cobra.Command {
	cmd := &cobra.Command{
		Use: "ps (--node NODE | --all-nodes | POD) [-- FLAGS]", Short: "list the containers with a GPU of a node, or of a pod's node",
		RunE: func(cmd *cobra.Command, args []string) error {
			pods, rest := cut(cmd, args)
			if len(pods) > 1 || len(pods) == 1 && (p.node != "" || p.allNodes) || len(pods) == 0 && p.node == "" == !p.allNodes {
				return usagef("ps takes a POD, or --node NODE, or --all-nodes")
			}
			agents, err := p.agents(cmd.Context())
			if err != nil {
				return err
			}
			if p.allNodes {
				var failed error
				for _, a := range agents {
					fmt.Fprintf(p.stdout, "# %s\n", a.Spec.NodeName)
					if err := p.exec(cmd.Context(), a.Metadata.Name, append([]string{"ps"}, rest...)); err != nil {
						failed = err
					}
				}
				return failed
			}
			node := p.node
			if len(pods) == 1 {
				pod, err := p.pod(cmd.Context(), pods[0])
				if err != nil {
					return err
				}
				node = pod.Spec.NodeName
			}
			return p.on(cmd.Context(), agents, node, append([]string{"ps"}, rest...))
		},
	}
	cmd.Flags().StringVar(&p.node, "node", "", "the node")
	cmd.Flags().BoolVarP(&p.allNodes, "all-nodes", "A", false, "every node, one after the other")
	return cmd
}

// cut is what stands before and behind the --.
func cut(cmd *cobra.Command, args []string) ([]string, []string) {
	if at := cmd.ArgsLenAtDash(); at >= 0 {
		return args[:at], args[at:]
	}
	return args, nil
}

// about is a command that gpufence has for one container.
func (p *plugin) about(command, short string) *cobra.Command {
	return &cobra.Command{
		Use: command + " POD[/CONTAINER] [-- FLAGS]", Short: short,
		RunE: func(cmd *cobra.Command, args []string) error {
			pods, rest := cut(cmd, args)
			if len(pods) != 1 {
				return usagef("%s takes one POD or POD/CONTAINER", command)
			}
			name, _, _ := strings.Cut(pods[0], "/")
			pod, err := p.pod(cmd.Context(), name)
			if err != nil {
				return err
			}
			agents, err := p.agents(cmd.Context())
			if err != nil {
				return err
			}
			// The node may have pods of that name in other namespaces.
			return p.on(cmd.Context(), agents, pod.Spec.NodeName, append([]string{command, pod.Metadata.Namespace + "/" + pods[0]}, rest...))
		},
	}
}

// object is a pod, as far as we look.
type object struct {
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

func (p *plugin) get(ctx context.Context, into any, args ...string) error {
	cmd := exec.CommandContext(ctx, p.kubectl, append(append([]string{}, p.global...), args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if said := strings.TrimSpace(stderr.String()); said != "" {
			return quota.NewError(quota.CodeKubectl, "kubectl gpufence cannot ask the cluster: %s", said)
		}
		return quota.NewError(quota.CodeKubectl, "kubectl gpufence cannot run %s: %w", p.kubectl, err)
	}
	if err := json.Unmarshal(stdout.Bytes(), into); err != nil {
		return quota.NewError(quota.CodeKubectl, "%s gave no answer of the API server: %w", p.kubectl, err)
	}
	return nil
}

// pod is a pod that is on a node.
func (p *plugin) pod(ctx context.Context, name string) (object, error) {
	var got object
	args := []string{"get", "pod", name, "-o", "json"}
	if p.namespace != "" {
		args = append(args, "-n", p.namespace)
	}
	if name == "" || strings.HasPrefix(name, "-") {
		return got, usagef("%q is not the name of a pod", name)
	}
	if err := p.get(ctx, &got, args...); err != nil {
		return got, err
	}
	if got.Spec.NodeName == "" {
		return got, quota.NewError(quota.CodeKubectl, "pod %s is on no node yet (%s)", name, got.Status.Phase).WithHint("see its events: kubectl describe pod %s", name)
	}
	return got, nil
}

// agents are the DaemonSet's pods.
func (p *plugin) agents(ctx context.Context) ([]object, error) {
	var list struct {
		Items []object `json:"items"`
	}
	if err := p.get(ctx, &list, "get", "pods", "-n", p.ours, "-l", daemonSet, "-o", "json"); err != nil {
		return nil, err
	}
	if len(list.Items) == 0 {
		return nil, quota.NewError(quota.CodeKubectl, "namespace %s has no pod of gpufence-agent", p.ours).WithHint("name the chart's namespace with --gpufence-namespace")
	}
	return list.Items, nil
}

// on runs gpufence on a node.
func (p *plugin) on(ctx context.Context, agents []object, node string, args []string) error {
	for _, a := range agents {
		if a.Spec.NodeName == node && a.Status.Phase == "Running" {
			return p.exec(ctx, a.Metadata.Name, args)
		}
	}
	return quota.NewError(quota.CodeKubectl, "node %s has no running pod of gpufence-agent", node).
		WithHint("see kubectl get pods -n %s -o wide, and the chart's nodeSelector", p.ours)
}

// exec hands the streams over; its error has kubectl's status.
func (p *plugin) exec(ctx context.Context, pod string, args []string) error {
	argv := append(append([]string{}, p.global...), "exec", "-n", p.ours, pod, "-c", container, "--", program)
	cmd := exec.CommandContext(ctx, p.kubectl, append(argv, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.stdin, p.stdout, p.stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run gpufence on the node: %w", err)
	}
	return nil
}
