package ops

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Disk is the disk space that the program uses, in bytes. Holes in files do not count.
type Disk struct {
	At       time.Time `json:"at" doc:"When it was measured."`
	Images   int64     `json:"images"`
	VMs      int64     `json:"vms" doc:"Disks and saved states of sessions and standby VMs."`
	Mirrors  int64     `json:"mirrors" doc:"Copies of remote repositories."`
	Tasks    int64     `json:"tasks" doc:"Logs and artifacts."`
	Sessions int64     `json:"sessions" doc:"Logs and keys of sessions."`
	Free     int64     `json:"free" doc:"On the disk of the VMs."`
	Reserve  int64     `json:"reserve" doc:"The setting limits.disk_reserve: no VM starts with less free space."`
}

// diskEvery is how long a measurement is used: it reads every directory.
const diskEvery = 30 * time.Second

// DiskCache is the latest measurement.
type DiskCache struct {
	mu   sync.Mutex
	last Disk
}

// GetDisk returns the disk space that the program uses.
var GetDisk = Operation[struct{}, Disk]{Spec{
	ID: "getDisk", Method: http.MethodGet, Path: "/api/v1/disk", Tag: "server", Need: Read,
	Summary: "Get the disk space that images, VMs, mirrors and tasks use",
	About:   "It is measured at most every 30 seconds.",
}, func(_ context.Context, e *Engine, _ *struct{}) (Disk, error) {
	c := e.Disk
	if c == nil {
		c = &DiskCache{}
	}
	c.mu.Lock() // the others wait for the one that measures
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.last.At) < diskEvery {
		return c.last, nil
	}
	cfg := e.sessions().Config
	host, err := session.MeasureHost(cfg.Paths.LimaHome)
	if err != nil {
		return Disk{}, err
	}
	c.last = Disk{
		Images: image.DiskUsage(cfg.Paths.Images()), VMs: image.DiskUsage(cfg.Paths.LimaHome), Mirrors: image.DiskUsage(cfg.Paths.Mirrors()),
		Tasks: image.DiskUsage(cfg.Paths.Tasks()), Sessions: image.DiskUsage(cfg.Paths.Sessions()),
		Free: int64(host.FreeDisk), Reserve: int64(cfg.Limits.DiskReserve), At: time.Now(),
	}
	return c.last, nil
}}
