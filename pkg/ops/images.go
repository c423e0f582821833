package ops

import (
	"context"
	"net/http"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// ImageList lists images, what is being built, and standby VMs.
type ImageList struct {
	Images []image.Info     `json:"images" nullable:"false"`
	Making []image.Making   `json:"making" nullable:"false" doc:"Builds in progress."`
	Pool   []golden.Standby `json:"pool" nullable:"false" doc:"Standby VMs."`

	Setups   []session.SavedSetup `json:"setups,omitempty" doc:"Results of repositories' setups, from which later sessions start."`
	Failures []image.Failure      `json:"failures,omitempty" doc:"Builds that failed and were not repeated since."`
}

// ListImages lists the images of the host.
var ListImages = Operation[struct{}, ImageList]{Spec{
	ID: "listImages", Method: http.MethodGet, Path: "/api/v1/images", Tag: "images", Need: Read,
	Summary: "List guest images, standby VMs and builds in progress",
}, func(_ context.Context, e *Engine, _ *struct{}) (list ImageList, err error) {
	if list.Images, err = e.Images.List(); err != nil {
		return list, err
	}
	making, err := e.Images.Underway()
	if err != nil {
		return list, err
	}
	list.Making = append([]image.Making{}, making...)
	if list.Failures, err = e.Images.Failures(); err != nil {
		return list, err
	}
	if list.Pool, err = golden.Standbys(e.sessions().Config.Paths.Pool()); err != nil {
		return list, err
	}
	list.Setups, err = session.SavedSetups{Paths: e.sessions().Config.Paths}.List()
	return list, err
}}
