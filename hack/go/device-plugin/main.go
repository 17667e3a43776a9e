// Command fake-device-plugin offers devices that do not exist to the kubelet:
//
//	fake-device-plugin RESOURCE COUNT UNHEALTHY_FILE
//
// UNHEALTHY_FILE holds names of devices that are to look broken, one a line (fake-gpu-0). It is read each second and
// need not exist.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	poll            = time.Second
	registerTimeout = 5 * time.Second
	socketName      = "spillway-fake.sock"
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	count         int
	unhealthyFile string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends the list of devices at once and whenever one becomes healthy or unhealthy.
func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	sent := "\x00" // differs from every list of names
	for {
		unhealthy := p.unhealthy()
		if key := strings.Join(unhealthy, " "); key != sent {
			if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices(unhealthy)}); err != nil {
				return err
			}
			sent = key
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(poll):
		}
	}
}

// Allocate names the devices in the variable that a real GPU runtime reads.
func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		visible := map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{Envs: visible})
	}
	return response, nil
}

func (p *plugin) unhealthy() []string {
	content, _ := os.ReadFile(p.unhealthyFile) // no file: all are healthy
	return strings.Fields(string(content))
}

func (p *plugin) devices(unhealthy []string) []*api.Device {
	var devices []*api.Device
	for i := range p.count {
		device := &api.Device{ID: fmt.Sprintf("fake-gpu-%d", i), Health: api.Healthy}
		if slices.Contains(unhealthy, device.ID) {
			device.Health = api.Unhealthy
		}
		devices = append(devices, device)
	}
	return devices
}

// serve offers the devices until the kubelet restarts, which wipes its folder and with it our socket.
func serve(resource string, p *plugin) error {
	socket := filepath.Join(api.DevicePluginPath, socketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go server.Serve(listener)
	defer server.Stop()
	if err := register(resource); err != nil {
		return err
	}
	log.Printf("registered %s x %d", resource, p.count)
	for {
		time.Sleep(poll)
		if _, err := os.Stat(socket); err != nil {
			return fmt.Errorf("the kubelet has restarted: %w", err)
		}
	}
}

func register(resource string) error {
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), registerTimeout)
	defer cancel()
	request := &api.RegisterRequest{
		Version: api.Version, Endpoint: socketName, ResourceName: resource, Options: &api.DevicePluginOptions{},
	}
	_, err = api.NewRegistrationClient(connection).Register(ctx, request)
	return err
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: fake-device-plugin RESOURCE COUNT UNHEALTHY_FILE")
	}
	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatalf("COUNT = %s: not a number", os.Args[2])
	}
	for {
		log.Print(serve(os.Args[1], &plugin{count: count, unhealthyFile: os.Args[3]}))
		time.Sleep(poll)
	}
}
