// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpufence/gpufence/enforcer/api"
)

// currentDocker is Docker's newest, built from its modules, with the containerd of tests/programs and its image store,
// which is what it comes with. The limit is an annotation.
type currentDocker struct{ docker }

func (d *currentDocker) up(ctx context.Context, t *testing.T, s *site) {
	d.s, d.dir, d.client, d.key = s, filepath.Join(s.disk, "docker-current"), s.bins["docker/docker"], true // it makes no key
	must(t, os.MkdirAll(d.dir, 0o755))
	daemon, config := s.bins["docker/dockerd"], filepath.Join(d.dir, "daemon.json")
	// A runc before 1.2, as some distributions have it, knows no time namespaces: dockerd's own way out.
	must(t, os.WriteFile(config, []byte("{\n  \"features\": {\"time-namespaces\": false}\n}\n"), 0o600))
	_, err := s.gpufence(ctx, "install", "--runtime", "docker", "--config", config, "--executable-path", daemon, "--validate", "always")
	must(t, err)
	path := filepath.Dir(s.bins["containerd/containerd"]) + ":" + os.Getenv("PATH")
	d.daemon, err = start(ctx, "dockerd", filepath.Join(d.dir, "log"), []string{gpufenceEnv(s), "PATH=" + path}, daemon, "--config-file", config, "--data-root", d.data(),
		"--exec-root", s.Path("docker"), "--pidfile", filepath.Join(d.dir, "pid"), "-H", d.sock(), "--iptables=false", "--ip6tables=false", "--bridge=none")
	must(t, err)
	must(t, d.daemon.Ready(ctx, func(ctx context.Context) error { _, err := d.docker.docker(ctx, "info"); return err }))
	out, err := d.docker.docker(ctx, "version", "--format", "client {{.Client.Version}}, server {{.Server.Version}}, API {{.Server.APIVersion}}")
	must(t, err)
	t.Logf("%s", strings.TrimSpace(out))
	for _, image := range s.images {
		_, err = d.docker.docker(ctx, "load", "-i", image)
		must(t, err)
	}
}

func (d *currentDocker) start(ctx context.Context, r request) (begun, error) {
	args := []string{"-H", d.sock(), "run", "--rm", "--network", "none", "--runtime", handler, "--name", unique(r.name), "--env", "NVIDIA_VISIBLE_DEVICES=0"}
	if r.limit != "" {
		args = append(args, "--annotation", "gpufence.dev/memory.max="+r.limit)
	}
	p, err := start(ctx, "docker", filepath.Join(d.dir, r.name+".log"), nil, d.client, append(append(args, clientImage), r.command...)...)
	return foreground{p}, err
}

// TestCurrentDocker takes Debian's Docker and the newest one through the same steps, with the same words, and Compose
// file on the newest.
func TestCurrentDocker(t *testing.T) {
	if os.Getenv("GPUFENCE_DOCKER") != "current" {
		t.Skip("SKIPPED: a current Docker takes long to build: make soak-docker")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s := newSite(ctx, t, "containerd", "docker", "compose")
	words := map[string]map[string]string{}
	debian, current := &docker{}, &currentDocker{}
	for _, one := range []struct {
		name string
		engine
		*docker
	}{{"Docker 20.10", debian, debian}, {"Docker, current", current, &current.docker}} {
		t.Run(one.name, func(t *testing.T) {
			begun := time.Now()
			b := &bench{site: s, engine: one.engine, words: map[string]string{}}
			t.Cleanup(func() { one.engine.down(t); t.Logf("%.1f s", time.Since(begun).Seconds()) })
			one.engine.up(ctx, t, s)
			for _, step := range []struct {
				name string
				do   func(context.Context, *testing.T)
			}{
				{"limited", b.limited},
				{"bypass", b.bypass},
				{"wrong", b.wrong},
				{"unlimited", b.unlimited},
				{"gpufenced down", b.daemonDown},
				{"in use", func(ctx context.Context, t *testing.T) { b.inUse(ctx, t, one.docker) }},
				{"compose", func(ctx context.Context, t *testing.T) {
					if one.docker == debian {
						t.Skip("SKIPPED: Compose of today does not speak with a dockerd of API 1.41")
					}
					b.compose(ctx, t, one.docker, "    annotations:\n      gpufence.dev/memory.max: 1Gi\n")
				}},
				{"compose, variable", func(ctx context.Context, t *testing.T) {
					if one.docker == debian {
						t.Skip("SKIPPED: Compose of today does not speak with a dockerd of API 1.41")
					}
					b.compose(ctx, t, one.docker, "      GPUFENCE_MEMORY_MAX: 1Gi\n")
				}},
			} {
				t.Run(step.name, func(t *testing.T) {
					begun := time.Now()
					t.Cleanup(func() {
						b.nothingLeft(ctx, t)
						t.Logf("%.1f s", time.Since(begun).Seconds())
					})
					step.do(ctx, t)
				})
			}
			words[one.name] = b.words
		})
	}
	for step, said := range words["Docker 20.10"] {
		if now := words["Docker, current"][step]; now != said {
			t.Errorf("%s: the current one says %q, Debian's %q", step, now, said)
		}
	}
}

// inUse: the runtime is not taken from a container, wherever dockerd keeps what runs.
func (b *bench) inUse(ctx context.Context, t *testing.T, d *docker) {
	c, err := b.begin(ctx, t, request{"inuse", "1Gi", client("context", "meminfo", "hold")})
	must(t, err)
	_, err = hear(ctx, c, "meminfo")
	must(t, err)
	out, err := b.gpufence(ctx, "uninstall", "--runtime", "docker", "--config", filepath.Join(d.dir, "daemon.json"))
	if err == nil || !strings.Contains(err.Error(), "1 containers use the runtime") {
		t.Errorf("uninstalled under a container: %s %v", out, err)
	}
}

// compose runs a file with a runtime, and the limit in the lines that follow its environment.
func (b *bench) compose(ctx context.Context, t *testing.T, d *docker, limit string) {
	program := b.bins["compose/cmd"]
	file, project := filepath.Join(d.dir, "compose.yaml"), unique("compose")
	text := fmt.Sprintf("services:\n  notebook:\n    image: %s\n    network_mode: none\n    runtime: %s\n    command: [/clients/client, context, fill 64, meminfo, hold]\n"+
		"    environment:\n      NVIDIA_VISIBLE_DEVICES: \"0\"\n%s", clientImage, handler, limit)
	must(t, os.WriteFile(file, []byte(text), 0o600))
	env := []string{"DOCKER_HOST=" + d.sock(), "HOME=" + d.dir}
	p, err := start(ctx, "compose", filepath.Join(d.dir, filepath.Base(t.Name())+".log"), env, program, "-f", file, "-p", project, "up")
	must(t, err)
	t.Cleanup(func() {
		_, err := runEnv(ctx, env, program, "-f", file, "-p", project, "down", "-t", "0")
		if err != nil {
			t.Error(err)
		}
		<-p.Done()
	})
	info, err := hear(ctx, foreground{p}, "meminfo")
	must(t, err)
	fill, err := hear(ctx, foreground{p}, "fill")
	must(t, err)
	if info.TotalBytes != 1024*mib || fill.ResultName != "CUDA_ERROR_OUT_OF_MEMORY" || fill.GrantedBytes+contextBytes > 1024*mib {
		t.Errorf("Compose's container sees %d MiB, got %d MiB and %s", info.TotalBytes/mib, fill.GrantedBytes/mib, fill.ResultName)
	}
	all, err := b.running(ctx)
	must(t, err)
	if len(all) != 1 || len(all[0].GPUs) != 1 || all[0].GPUs[0].Limits.Max != 1024*mib || all[0].Key.Engine != b.is() {
		t.Errorf("gpufenced has %+v", all)
	}
	must(t, until(ctx, "the refusal is counted", func() (bool, error) {
		all, err := b.running(ctx)
		return len(all) == 1 && refusals(all[0]) > 0, err
	}))
}

func refusals(c api.Container) (n uint64) {
	for _, g := range c.GPUs {
		n += g.Events.Max
	}
	return n
}
