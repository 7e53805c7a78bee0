// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpufence/gpufence/cmd/internal/man"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/kube/agent"
	"github.com/gpufence/gpufence/enforcer/kube/cri"
	"github.com/gpufence/gpufence/enforcer/kube/host"
)

// canaryFile is how the container host hands the canary's result to the container agent.
const canaryFile = "/run/gpufence/canary.json"

func root(getenv func(string) string) *cobra.Command {
	cmd := &cobra.Command{
		Use: "gpufence-agent", Short: "gpufence on a node of Kubernetes", Version: api.BuildVersion,
		SilenceErrors: true, SilenceUsage: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.AddCommand(runCommand(getenv), hostCommand(), man.Command(cmd, api.BuildVersion))
	return cmd
}

func logger() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(os.Stderr)
	return log
}

func runCommand(getenv func(string) string) *cobra.Command {
	o := agent.Options{Log: logger()}
	var socket, kubeconfig, metrics string
	cmd := &cobra.Command{
		Use: "run", Short: "stand between gpufenced and the API server", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := connect(kubeconfig)
			if err != nil {
				return err
			}
			a, err := agent.New(client, api.NewClient(socket, 0), o)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			failed := make(chan error, 1)
			if metrics != "" {
				go func() {
					failed <- a.Serve(ctx, metrics)
					cancel()
				}()
			} else {
				failed <- nil
			}
			err = a.Run(ctx)
			cancel()
			if err = errors.Join(err, <-failed); cmd.Context().Err() != nil && errors.Is(err, context.Canceled) {
				return nil // told to end
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&socket, "socket", config.Default().Socket, "gpufenced's socket")
	f.StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server (default: as a pod does)")
	f.StringVar(&o.Node, "node", getenv("NODE_NAME"), "name of this node (default $NODE_NAME)")
	f.StringVar(&o.Handler, "handler", "gpufence", "the RuntimeClass's handler")
	f.StringVar(&o.CanaryFile, "canary-file", canaryFile, "where the canary's result lies")
	f.StringVar(&o.StateDir, "state-dir", "/var/lib/gpufence-agent", "where it is kept what was reported")
	f.DurationVar(&o.CanaryAge, "canary-age", time.Hour, "how old a canary may be")
	f.StringVar(&metrics, "metrics-address", ":9836", "where /metrics and /healthz are; \"\": nowhere")
	return cmd
}

// connect makes a client that is polite to the API server: a node's agent has little to say.
func connect(kubeconfig string) (kubernetes.Interface, error) {
	var c *rest.Config
	var err error
	if kubeconfig == "" {
		c, err = rest.InClusterConfig()
	} else {
		c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	c.QPS, c.Burst = 5, 20
	c.UserAgent = "gpufence-agent/" + api.BuildVersion
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server: %w", err)
	}
	return client, nil
}

func hostCommand() *cobra.Command {
	o := host.Options{Log: logger(), Root: "/proc/1/root"}
	var namespace, engineSocket string
	cmd := &cobra.Command{
		Use: "host", Short: "put gpufence on the node, keep it there, and start canaries", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Commander = host.Enter{Namespace: namespace}
			o.Engine = cri.Node{Root: o.Root, Kind: o.Runtime, Socket: engineSocket}
			h, err := host.New(o)
			if err != nil {
				return err
			}
			h.Run(cmd.Context())
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.Install, "install", true, "put programs, units and the engine's configuration on the node")
	f.StringVar(&o.Image, "image-dir", "/opt/gpufence", "where this image has them")
	f.StringVar(&o.InstallDir, "install-dir", "/opt/gpufence", "where they go on the node")
	f.StringVar(&o.Runtime, "runtime", "containerd", "the engine: containerd, crio")
	f.StringVar(&o.Handler, "handler", "gpufence", "the RuntimeClass's handler, which the engine must have loaded")
	f.StringVar(&engineSocket, "engine-socket", "", "where the engine serves CRI on the node (default: where its distributions do)")
	f.StringArrayVar(&o.InstallArgs, "install-arg", nil, "more for `gpufence install`")
	f.StringVar(&o.Program, "gpufence", "", "gpufence on the node (default: in --install-dir, else /usr/bin/gpufence)")
	f.StringVar(&o.Socket, "socket", "", "gpufenced's socket on the node (default: its own)")
	f.StringVar(&o.ResultFile, "canary-file", canaryFile, "where the canary's result goes on the node")
	f.DurationVar(&o.Every, "canary-interval", 10*time.Minute, "how often a canary is started")
	f.StringVar(&namespace, "mount-namespace", "", "the node's mount namespace (default: that of process 1)")
	return cmd
}
