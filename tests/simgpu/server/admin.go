// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

// State is what `simgpu state` shows.
type State struct {
	PID           int            `json:"pid"` // of simgpud
	TimeNS        int64          `json:"t_ns"`
	DriverVersion string         `json:"driver_version"`
	CUDAVersion   uint32         `json:"cuda_version"`
	GPUs          []driver.State `json:"gpus"`
}

// HasLimits says whether the driver limits the memory of cgroups: its NVML has the calls then.
func (s State) HasLimits() bool { return hasLimits(s.DriverVersion) }

// Settings is what `simgpu set` sends.
type Settings struct {
	GPU   *int              `json:"gpu,omitempty"` // its number, with its instances; nil: all
	Knobs map[string]string `json:"knobs"`
}

// maxBody bounds what the admin socket reads.
const maxBody = 1 << 20

func (s *Server) serveAdmin(l net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/state", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, s.State()) })
	mux.HandleFunc("GET /v1/history", func(w http.ResponseWriter, r *http.Request) {
		pid, err := strconv.Atoi(r.URL.Query().Get("pid"))
		if err != nil {
			http.Error(w, "read pid: write a process id", http.StatusBadRequest)
			return
		}
		s.answer(w, s.History(pid))
	})
	mux.HandleFunc("POST /v1/set", func(w http.ResponseWriter, r *http.Request) {
		var set Settings
		dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		dec.DisallowUnknownFields()
		err := dec.Decode(&set)
		if err == nil {
			err = s.Set(set)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: s.cfg.Log}
	go func() {
		<-s.done
		_ = srv.Close() // we are going
	}()
	if err := srv.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		s.cfg.Log.Printf("serve admin: %v", err)
	}
}

func (s *Server) answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.cfg.Log.Printf("answer admin: %v", err)
	}
}

// State is a copy of everything, GPU by GPU.
func (s *Server) State() State {
	st := State{PID: os.Getpid(), TimeNS: Now(), DriverVersion: s.cfg.DriverVersion, CUDAVersion: s.cfg.CUDAVersion, GPUs: []driver.State{}}
	for _, g := range s.gpus {
		s.enter(g)
		st.GPUs = append(st.GPUs, g.model.State(Now()))
		g.mu.Unlock()
	}
	return st
}

// History is what the processes with that pid held over time, on every GPU.
func (s *Server) History(pid int) []driver.History {
	all := []driver.History{}
	for _, g := range s.gpus {
		s.enter(g)
		all = append(all, g.model.Histories(Now(), pid)...)
		g.mu.Unlock()
	}
	return all
}

// Set changes knobs: all that are named, or none if one of them is wrong.
func (s *Server) Set(set Settings) error {
	gpus := s.gpus
	if set.GPU != nil {
		if *set.GPU < 0 || *set.GPU >= len(s.gpus) {
			return fmt.Errorf("no GPU %d: there are %d", *set.GPU, len(s.gpus))
		}
		gpus = append([]*gpu{s.gpus[*set.GPU]}, s.gpus[*set.GPU].instances...)
	}
	names := make([]string, 0, len(set.Knobs))
	for name := range set.Knobs {
		names = append(names, name)
	}
	sort.Strings(names)
	change := func(k *driver.Knobs) error {
		for _, name := range names {
			if err := driver.SetKnob(k, name, set.Knobs[name]); err != nil {
				return err
			}
		}
		return nil
	}
	if err := change(&driver.Knobs{}); err != nil {
		return err
	}
	for _, g := range gpus {
		s.enter(g)
		k := g.model.Knobs()
		err := change(&k)
		if err == nil {
			g.model.SetKnobs(Now(), k)
			close(g.change)
			g.change = make(chan struct{})
		}
		g.mu.Unlock()
		g.poke()
		if err != nil {
			return err
		}
	}
	return nil
}

// Client speaks to the admin socket of a running simgpud.
type Client struct {
	dir  string
	http *http.Client
}

// NewClient is a client of the simgpud whose sockets are in dir.
func NewClient(dir string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(dir, wire.Admin))
	}
	return &Client{dir, &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

func (c *Client) do(ctx context.Context, method, path string, body, into any) error {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://simgpud"+path, r)
	if err != nil {
		return fmt.Errorf("ask simgpud: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask simgpud in %s (start one with: simgpu up --dir %s): %w", c.dir, c.dir, err)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end below
	if resp.StatusCode >= http.StatusBadRequest {
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
		if err != nil {
			return fmt.Errorf("read simgpud's answer: %w", err)
		}
		return errors.New(strings.TrimSpace(string(text)))
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("read simgpud's answer: %w", err)
	}
	return nil
}

// State asks for everything.
func (c *Client) State(ctx context.Context) (State, error) {
	var st State
	err := c.do(ctx, http.MethodGet, "/v1/state", nil, &st)
	return st, err
}

// History asks what the processes with that pid held over time.
func (c *Client) History(ctx context.Context, pid int) ([]driver.History, error) {
	var all []driver.History
	err := c.do(ctx, http.MethodGet, "/v1/history?pid="+url.QueryEscape(strconv.Itoa(pid)), nil, &all)
	return all, err
}

// Set changes knobs.
func (c *Client) Set(ctx context.Context, set Settings) error {
	return c.do(ctx, http.MethodPost, "/v1/set", set, nil)
}
