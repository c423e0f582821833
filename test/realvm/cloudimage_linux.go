package realvm

import (
	"context"
	"crypto/sha256"
	_ "embed" // the script
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

//go:embed cloudimage.sh
var cloudImageScript string

const envCloudImage = "REALVM_CLOUD_IMAGE"

// CloudImage returns the directory of the stand-in for the cloud image that users
// download. It contains disk.qcow2 and, in pool/, the packages that provisioning
// installs in it.
func CloudImage() string { return os.Getenv(envCloudImage) }

// BuildCloudImage makes CloudImage from Debian packages, unless an earlier run made it
// with the same script. It is an Outside.
func BuildCloudImage(ctx context.Context, dir string) ([]string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	cache = filepath.Join(cache, "agent-sessionizer-e2e")
	final := filepath.Join(cache, fmt.Sprintf("cloudimage-%.12x", sha256.Sum256([]byte(cloudImageScript))))
	env := []string{envCloudImage + "=" + final}
	if _, err := os.Stat(final); err == nil {
		return env, nil
	}
	script := filepath.Join(dir, "cloudimage.sh")
	if err := os.WriteFile(script, []byte(cloudImageScript), 0o700); err != nil {
		return nil, err
	}
	// Remove images of other scripts and of interrupted runs.
	old, err := filepath.Glob(filepath.Join(cache, "cloudimage-*"))
	if err != nil {
		return nil, err
	}
	for _, o := range old {
		if err := os.RemoveAll(o); err != nil {
			return nil, err
		}
	}
	made := final + ".new"
	if err := os.MkdirAll(made, 0o755); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "bash", script, made)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// Interrupted, mmdebstrap and the script remove their directories.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("make the cloud image: %w", err)
	}
	return env, os.Rename(made, final)
}
