// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// listenFD is the first descriptor that systemd passes.
const listenFD = 3

// SystemdListener is the socket that systemd opened for us, nil if it did not. getenv and pid are
// the process's own.
func SystemdListener(getenv func(string) string, pid int) (net.Listener, error) {
	if getenv("LISTEN_PID") != strconv.Itoa(pid) {
		return nil, nil // not for us, or no socket activation at all
	}
	n, err := strconv.Atoi(getenv("LISTEN_FDS"))
	if err != nil || n < 1 {
		return nil, fmt.Errorf("take systemd's socket: LISTEN_FDS is %q", getenv("LISTEN_FDS"))
	}
	if n > 1 {
		return nil, fmt.Errorf("take systemd's socket: it passes %d, one is expected", n)
	}
	f := os.NewFile(listenFD, "systemd")
	if f == nil {
		return nil, errors.New("take systemd's socket: descriptor 3 is not open")
	}
	l, err := net.FileListener(f)
	err = errors.Join(err, f.Close()) // FileListener has its own copy
	if err != nil {
		return nil, fmt.Errorf("take systemd's socket: %w", err)
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("take systemd's socket: it is a %T, not a unix socket", l), l.Close())
	}
	ul.SetUnlinkOnClose(false) // the path is systemd's
	return ul, nil
}

// notifyTime is how long systemd may take to take a state.
const notifyTime = 100 * time.Millisecond

// Notify tells systemd a state such as READY=1; without systemd it does nothing.
func Notify(getenv func(string) string, state string) error {
	addr := getenv("NOTIFY_SOCKET")
	if addr == "" {
		return nil
	}
	if strings.HasPrefix(addr, "@") {
		addr = "\x00" + addr[1:]
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: addr, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	// It is told under locks that everything waits for: one that does not read must not hold us up.
	err = conn.SetWriteDeadline(time.Now().Add(notifyTime))
	if err == nil {
		_, err = conn.Write([]byte(state))
	}
	if err := errors.Join(err, conn.Close()); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
